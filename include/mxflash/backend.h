// Which implementations exist, which run here, and how one is forced.
//
// Every operation has one list, best first, `ref` last. A call takes the first implementation that is available and
// supports its arguments. A name forces one: the `backend` member of a call, else the environment variable
// MXFLASH_BACKEND. A forced backend that is unknown, unavailable or unable is an error, never a silent fallback. A name
// with a variant, such as sm90_bf16, stands for sm90 in operations that have no such variant.
#pragma once

#include <mxflash/types.h>

namespace mxflash {

enum class Operation : int32_t {
  quantize = 0,
  dequantize,
  convert_scales,
  attention_fwd,
  attention_bwd,
  rmsnorm_quantize,
  gemm_quantize,
  write_image,
  rmsnorm_bwd,
};
inline constexpr int32_t kNumOperations = 9;

const char* operation_name(Operation op);  // "attention_fwd"; "invalid" outside the enum

struct BackendInfo {
  const char* name = nullptr;    // "ref", "cpu", "sm90", "sm90_bf16"; null if the index is out of range
  const char* target = nullptr;  // what it runs on, for people
  Status available{};            // ok, or why it cannot run on this machine
};

int32_t num_backends(Operation op);
BackendInfo backend_info(Operation op, int32_t index);  // index 0 is the first choice

// What the kernels of backend `cpu` use in this process: "avx512_bf16", "avx512", "avx2", "neon" or "portable". The
// environment variable MXFLASH_CPU_ISA forces one; with a name that is unknown or cannot run, calls on the CPU fail.
const char* cpu_isa();
const char* available_cpu_isa(int32_t index);  // what could be forced here, best first; null if out of range

// Threads used by CPU backends in this process; 0 (the start value) means one per CPU that the process may run on.
// Results do not depend on it.
void set_num_threads(int32_t n);
int32_t num_threads();

// A host's executor in place of the library's own threads, which are started at the first call that wants them, sleep
// when idle, and are shared by concurrent calls. It calls task(context, i) once for every i in [0, count), in any
// order, on any threads or all on one, and returns when all are done; it does not throw. count is at most
// num_threads(). Tasks share out the work among themselves as they come: results do not depend on the executor, and a
// task that comes late finds nothing left to do. Null gives the own threads back. To be set while no call is running.
// With OpenMP:
//   void openmp(void*, int32_t count, mxflash::ParallelTask task, void* context) {
//   #pragma omp parallel for schedule(static, 1) num_threads(count)
//     for (int32_t i = 0; i < count; ++i) task(context, i);
//   }
//   mxflash::set_parallel_for(openmp, nullptr);
using ParallelTask = void (*)(void* context, int32_t index);
using ParallelFor = void (*)(void* executor, int32_t count, ParallelTask task, void* context);
void set_parallel_for(ParallelFor run, void* executor);
bool has_parallel_for();  // an executor is set

const char* version();  // "0.1.0"

}  // namespace mxflash
