// Selection of an implementation: a list per operation, best first, `ref` last.
#pragma once

#include <mxflash/backend.h>

#include <cstddef>
#include <span>

#include "runtime/status.h"

namespace mxflash {

template <class Args>
struct Impl {
  const char* name;
  const char* target;                // for people: "any CPU, scalar"
  Status (*available)();             // ok, or why this machine cannot run it
  Status (*supports)(const Args&);   // ok, or the rule that these (already checked) arguments break, with the value
  size_t (*workspace)(const Args&);  // bytes; null: none
  Status (*run)(const Args&, Stream);
};

template <class Args>
using ImplList = std::span<const Impl<Args>* const>;

// MXFLASH_BACKEND, or null if unset or empty.
const char* backend_from_environment();
bool same_name(const char* a, const char* b);
Status unknown_backend(const char* op, const char* name, const char* known);

template <class Args>
struct Choice {
  Status status;
  const Impl<Args>* impl = nullptr;
};

// The forced implementation, or the first that is available and supports the arguments. With none, the status is that
// of the last one tried: `ref`, which supports the most.
template <class Args>
Choice<Args> choose(const char* op, ImplList<Args> list, const Args& args) {
  const char* forced = args.backend ? args.backend : backend_from_environment();
  Status last = make_status(StatusCode::unavailable, "%s: no backend is built in", op);
  char known[128] = {};
  size_t used = 0;
  for (const Impl<Args>* entry : list) {
    const Impl<Args>& impl = *entry;
    for (const char* c = used ? ", " : ""; *c && used + 1 < sizeof known; ++c) known[used++] = *c;
    for (const char* c = impl.name; *c && used + 1 < sizeof known; ++c) known[used++] = *c;
    if (forced && !same_name(forced, impl.name)) continue;
    last = impl.available();
    if (last.ok()) last = impl.supports(args);
    if (last.ok()) return {last, &impl};
    if (forced) return {last, nullptr};
  }
  if (forced) return {unknown_backend(op, forced, known), nullptr};
  return {last, nullptr};
}

template <class Args>
Status dispatch(const char* op, ImplList<Args> list, const Args& args, Stream stream) {
  const Choice<Args> choice = choose(op, list, args);
  return choice.impl ? choice.impl->run(args, stream) : choice.status;
}

}  // namespace mxflash
