// Selection of an implementation: a list per operation, best first, `ref` last.
#pragma once

#include <mxflash/backend.h>

#include <cstddef>
#include <span>

#include "runtime/cpu_isa.h"
#include "runtime/status.h"

namespace mxflash {

template <class Args>
struct Impl {
  const char* name;
  const char* target;                // for people: "any CPU, the specification"
  DeviceType device;                 // where its tensors must be
  Status (*available)();             // ok, or why this machine cannot run it
  Status (*supports)(const Args&);   // ok, or the rule that these (already checked) arguments break, with the value
  size_t (*workspace)(const Args&);  // bytes; null: none
  Status (*run)(const Args&, Stream);
};

template <class Args>
using ImplList = std::span<const Impl<Args>* const>;

// The backend that a call names, else what MXFLASH_BACKEND does; null if neither does.
const char* forced_backend(const char* named);
bool same_name(const char* a, const char* b);
bool is_variant(const char* name, const char* of);  // "sm90_bf16" of "sm90"
Status unknown_backend(const char* op, const char* name, const char* known);
Status wrong_device(const char* op, const char* backend, DeviceType wants, Device got);
Status no_backend(const char* op, Device device, const char* known);

template <class Args>
struct Choice {
  Status status;
  const Impl<Args>* impl = nullptr;
};

// The forced implementation, or the first for this device that is available and supports the arguments. With none, the
// status says the most useful thing: what the last available one for this device refused (the list ends with the one
// that supports most), else why the last one for this device is not available.
template <class Args>
Choice<Args> choose(const char* op, ImplList<Args> list, const Args& args, Device device) {
  // A forced instruction set or arithmetic that cannot be had is an error too, not a reason to take the next backend.
  if (device.type == DeviceType::cpu) {
    if (const Status status = cpu_isa_status(); !status.ok()) return {status, nullptr};
  }
  const char* forced = forced_backend(args.backend);
  // An operation that lacks the forced variant of a backend takes the backend itself.
  bool has_forced = false;
  for (const Impl<Args>* impl : list) has_forced |= forced && same_name(forced, impl->name);
  const auto is_forced = [&](const char* name) {
    return has_forced ? same_name(forced, name) : is_variant(forced, name);
  };
  Status refused{}, unavailable{};
  char known[128] = {};
  size_t used = 0;
  for (const Impl<Args>* impl : list) {
    for (const char* c = used ? ", " : ""; *c && used + 1 < sizeof known; ++c) known[used++] = *c;
    for (const char* c = impl->name; *c && used + 1 < sizeof known; ++c) known[used++] = *c;
    if (forced ? !is_forced(impl->name) : impl->device != device.type) continue;
    if (impl->device != device.type) return {wrong_device(op, impl->name, impl->device, device), nullptr};
    Status status = impl->available();
    if (!status.ok()) {
      status = unavailable = make_status(status.code, "%s: %s: %s", op, impl->name, status.message);
    } else if (status = impl->supports(args); status.ok()) {
      return {{}, impl};
    } else {
      refused = status;
    }
    if (forced) return {status, nullptr};
  }
  if (forced) return {unknown_backend(op, forced, known), nullptr};
  if (!refused.ok()) return {refused, nullptr};
  if (!unavailable.ok()) return {unavailable, nullptr};
  return {no_backend(op, device, known), nullptr};
}

template <class Args>
Status dispatch(const char* op, ImplList<Args> list, const Args& args, Device device, Stream stream) {
  const Choice<Args> choice = choose(op, list, args, device);
  return choice.impl ? choice.impl->run(args, stream) : choice.status;
}

}  // namespace mxflash
