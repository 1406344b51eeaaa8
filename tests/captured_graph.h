// Work that a stream captured once, to be replayed with other lengths or other bytes in the same memory.
#pragma once

#include <cuda_runtime_api.h>

#include "kit/device_memory.h"
#include "kit/runner.h"
#include "runtime/cuda.h"

namespace mxflash {

class CapturedGraph {
 public:
  // enqueue(stream) throws where it fails.
  template <class Enqueue>
  explicit CapturedGraph(const Enqueue& enqueue) {
    require(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), "capture");
    enqueue(stream_.get());
    cudaGraph_t graph{};
    require(cudaStreamEndCapture(stream_.get(), &graph), "end of capture");
    const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    require(error, "graph");
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  ~CapturedGraph() { cudaGraphExecDestroy(exec_); }

  // Behind all that the device has been given; waits for the last.
  void replay(int times = 1) const {
    require(cudaDeviceSynchronize(), "before the graph");
    for (int n = 0; n < times; ++n) require(cudaGraphLaunch(exec_, stream_.get()), "launch");
    stream_.wait();
  }

 private:
  static void require(cudaError_t error, const char* what) { kit::require_ok(cuda_status(error, what)); }

  kit::DeviceStream stream_;
  cudaGraphExec_t exec_{};
};

}  // namespace mxflash
