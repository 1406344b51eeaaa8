#include "kit/call.h"

#include <mxflash/backend.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <optional>
#include <string>
#include <string_view>

#include "kit/device_memory.h"
#include "kit/runner.h"

namespace mxflash::kit {
namespace {

// The memory of one call on the device.
class DeviceCall {
 public:
  Stream stream() const { return stream_.get(); }

  void move_in(Tensor& t) { move(t, false); }
  void move_out(Tensor& t) { move(t, true); }
  void move_in(MxTensor& t) {
    move(t.data, false);
    move(t.scale, false);
  }
  void move_out(MxTensor& t) {
    move(t.data, true);
    move(t.scale, true);
  }
  void move_in(Jagged& seq) {
    if (!seq.cu_seqlens) return;
    const Copy& copy = add(seq.cu_seqlens, size_t(seq.batch + 1) * sizeof(int32_t));
    seq.cu_seqlens = static_cast<const int32_t*>(copy.buffer.data());
  }
  template <class Stats>
  void move_out(Stats*& stats) {
    if (!stats) return;
    Copy& copy = add(stats, sizeof *stats);
    copy.host = stats;
    stats = static_cast<Stats*>(copy.buffer.data());
  }
  void* bytes_in(const void* host, size_t size) { return add(host, size).buffer.data(); }
  void* bytes_out(void* host, size_t size) {
    Copy& copy = add(host, size);
    copy.host = host;
    return copy.buffer.data();
  }
  void* workspace(size_t size) {
    copies_.push_back({.buffer = DeviceBuffer(size), .host = nullptr});
    copies_.back().buffer.fill(0xFF, stream());
    return copies_.back().buffer.data();
  }

  // Waits, and copies the outputs back.
  Status finish(const Status& status) {
    if (!status.ok()) return status;
    stream_.wait();
    for (const Copy& copy : copies_) {
      if (copy.host) copy.buffer.download(copy.host, 0, copy.buffer.size(), stream());
    }
    return status;
  }

 private:
  struct Copy {
    DeviceBuffer buffer;
    void* host;  // of an output
  };

  Copy& add(const void* host, size_t size) {
    copies_.push_back({.buffer = DeviceBuffer(size), .host = nullptr});
    copies_.back().buffer.upload(host, size, stream());
    return copies_.back();
  }

  // The bytes between the lowest and the highest element, whatever the strides.
  void move(Tensor& t, bool output) {
    t.device = {DeviceType::cuda, 0};
    if (!t.data || t.numel() == 0) return;
    int64_t low = 0, high = 0;
    for (int i = 0; i < t.rank; ++i) {
      const int64_t reach = (t.shape[size_t(i)] - 1) * t.stride[size_t(i)];
      low += std::min<int64_t>(reach, 0);
      high += std::max<int64_t>(reach, 0);
    }
    const int64_t size = dtype_size(t.dtype);
    char* const first = static_cast<char*>(t.data) + low * size;
    Copy& copy = add(first, size_t((high - low + 1) * size));
    if (output) copy.host = first;
    t.data = static_cast<char*>(copy.buffer.data()) - low * size;
  }

  DeviceStream stream_;
  std::list<Copy> copies_;
};

// The backend on a card of this name. Those of attention_fwd are all that there are. Calls with a name that is none go
// to the library as they are: it says so.
std::optional<BackendInfo> device_backend(std::string_view name) {
  for (int32_t i = 0; i < num_backends(Operation::attention_fwd); ++i) {
    const BackendInfo info = backend_info(Operation::attention_fwd, i);
    if (is_device_backend(info.name) && name == info.name) return info;
  }
  return std::nullopt;
}

// What a call names, else what MXFLASH_BACKEND does.
std::string_view forced_backend(const char* backend) {
  if (!backend) backend = std::getenv("MXFLASH_BACKEND");
  return backend ? backend : "";
}

bool on_device(const char* backend) {
  const std::string_view forced = forced_backend(backend);
  return !forced.empty() && device_backend(forced);
}

Status error_status(StatusCode code, const std::string& message) {
  Status status{.code = code};
  message.copy(status.message, sizeof status.message - 1);
  return status;
}

// Runs `body` with the call's memory; its exceptions are the call's Status.
template <class Body>
Status on_device_memory(const char* backend, Body&& body) {
  try {
    const BackendInfo info = *device_backend(forced_backend(backend));
    if (!info.available.ok())
      return error_status(info.available.code, std::string(info.name) + ": " + info.available.message);
    DeviceCall device;
    return device.finish(body(device));
  } catch (const StatusError& error) {
    return error_status(error.code, error.what());
  }
}

}  // namespace

Status call(const Quantize& args) {
  if (!on_device(args.backend)) return quantize(args);
  return on_device_memory(args.backend, [&](DeviceCall& device) {
    Quantize a = args;
    device.move_in(a.in);
    device.move_in(a.seq);
    device.move_out(a.out);
    device.move_out(a.out_col);
    device.move_out(a.mean);
    device.move_out(a.image);
    device.move_out(a.stats);
    return quantize(a, device.stream());
  });
}

Status call(const Dequantize& args) {
  if (!on_device(args.backend)) return dequantize(args);
  return on_device_memory(args.backend, [&](DeviceCall& device) {
    Dequantize a = args;
    device.move_in(a.in);
    device.move_in(a.seq);
    device.move_out(a.out);
    return dequantize(a, device.stream());
  });
}

Status call(const ConvertScales& args) {
  if (!on_device(args.backend)) return convert_scales(args);
  return on_device_memory(args.backend, [&](DeviceCall& device) {
    ConvertScales a = args;
    device.move_in(a.in);
    device.move_in(a.seq);
    device.move_out(a.out);
    return convert_scales(a, device.stream());
  });
}

Status call(const RmsnormQuantize& args) {
  if (!on_device(args.backend)) return rmsnorm_quantize(args);
  return on_device_memory(args.backend, [&](DeviceCall& device) {
    RmsnormQuantize a = args;
    device.move_in(a.in);
    device.move_in(a.weight);
    device.move_in(a.seq);
    device.move_out(a.residual);
    device.move_out(a.out);
    device.move_out(a.y);
    device.move_out(a.rstd);
    return rmsnorm_quantize(a, device.stream());
  });
}

Status call(RmsnormBwd a) {
  if (!on_device(a.backend)) {
    const AlignedBuffer workspace(rmsnorm_bwd_workspace(a));
    a.workspace = workspace.data();
    a.workspace_size = workspace.size();
    return rmsnorm_bwd(a);
  }
  return on_device_memory(a.backend, [&](DeviceCall& device) {
    const bool in_place = a.dh && a.dh.data == a.dx.data;
    for (Tensor* t : {&a.h, &a.weight, &a.rstd, &a.dy}) device.move_in(*t);
    device.move_in(a.dy_mx);
    device.move_in(a.seq);
    if (!in_place) device.move_in(a.dh);
    for (Tensor* t : {&a.dx, &a.dw}) device.move_out(*t);
    if (in_place) a.dh = a.dx;
    a.workspace_size = rmsnorm_bwd_workspace(a);
    a.workspace = device.workspace(a.workspace_size);
    return rmsnorm_bwd(a, device.stream());
  });
}

Status call(AttentionFwd a) {
  if (!on_device(a.backend)) {
    const AlignedBuffer workspace(attention_fwd_workspace(a));
    a.workspace = workspace.data();
    a.workspace_size = workspace.size();
    return attention_fwd(a);
  }
  return on_device_memory(a.backend, [&](DeviceCall& device) {
    for (MxTensor* t : {&a.q, &a.k, &a.v}) device.move_in(*t);
    for (Tensor* t : {&a.v_mean, &a.q_image, &a.k_image, &a.v_image}) device.move_in(*t);
    for (Tensor* t : {&a.out, &a.lse, &a.row_exponent}) device.move_out(*t);
    device.move_out(a.out_mx);
    device.move_in(a.seq_q);
    device.move_in(a.seq_k);
    a.workspace_size = attention_fwd_workspace(a);
    a.workspace = device.workspace(a.workspace_size);
    return attention_fwd(a, device.stream());
  });
}

Status call(OperatorFwd a, AlignedBuffer& saved) {
  if (!on_device(a.backend)) {
    saved = AlignedBuffer(operator_saved(a));
    const AlignedBuffer workspace(operator_fwd_workspace(a));
    a.saved = saved.data();
    a.saved_size = saved.size();
    a.workspace = workspace.data();
    a.workspace_size = workspace.size();
    return operator_fwd(a);
  }
  return on_device_memory(a.backend, [&](DeviceCall& device) {
    for (Tensor* t : {&a.q, &a.k, &a.v}) device.move_in(*t);
    for (Tensor* t : {&a.out, &a.lse}) device.move_out(*t);
    device.move_in(a.seq_q);
    device.move_in(a.seq_k);
    device.move_out(a.stats);
    saved = AlignedBuffer(operator_saved(a));
    a.saved = device.bytes_out(saved.data(), saved.size());
    a.saved_size = saved.size();
    a.workspace_size = operator_fwd_workspace(a);
    a.workspace = device.workspace(a.workspace_size);
    return operator_fwd(a, device.stream());
  });
}

Status call(OperatorBwd a) {
  if (!on_device(a.fwd.backend)) {
    const AlignedBuffer workspace(operator_bwd_workspace(a));
    a.workspace = workspace.data();
    a.workspace_size = workspace.size();
    return operator_bwd(a);
  }
  return on_device_memory(a.fwd.backend, [&](DeviceCall& device) {
    OperatorFwd& fwd = a.fwd;
    for (Tensor* t : {&fwd.q, &fwd.k, &fwd.v, &fwd.out, &fwd.lse, &a.dout, &a.dlse}) device.move_in(*t);
    for (Tensor* t : {&a.dq, &a.dk, &a.dv}) device.move_out(*t);
    for (MxTensor* t : {&a.dk_mx, &a.dv_mx}) device.move_out(*t);
    device.move_in(fwd.seq_q);
    device.move_in(fwd.seq_k);
    device.move_out(fwd.stats);
    fwd.saved = device.bytes_in(fwd.saved, fwd.saved_size);
    a.workspace_size = operator_bwd_workspace(a);
    a.workspace = device.workspace(a.workspace_size);
    return operator_bwd(a, device.stream());
  });
}

Status call(AttentionBwd a) {
  if (!on_device(a.backend)) {
    const AlignedBuffer workspace(attention_bwd_workspace(a));
    a.workspace = workspace.data();
    a.workspace_size = workspace.size();
    return attention_bwd(a);
  }
  return on_device_memory(a.backend, [&](DeviceCall& device) {
    for (MxTensor* t : {&a.q, &a.k, &a.v, &a.dout, &a.q_col, &a.k_col, &a.dout_col}) device.move_in(*t);
    for (Tensor* t : {&a.out, &a.lse, &a.row_exponent, &a.v_mean, &a.k_mean, &a.dlse}) device.move_in(*t);
    for (Tensor* t : {&a.dq, &a.dk, &a.dv}) device.move_out(*t);
    for (MxTensor* t : {&a.dk_mx, &a.dv_mx}) device.move_out(*t);
    device.move_in(a.seq_q);
    device.move_in(a.seq_k);
    a.workspace_size = attention_bwd_workspace(a);
    a.workspace = device.workspace(a.workspace_size);
    return attention_bwd(a, device.stream());
  });
}

}  // namespace mxflash::kit
