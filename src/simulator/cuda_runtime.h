// As nvcc gives it to kernels, in simulation.
#pragma once

#include "cuda_runtime_api.h"
#include "simulator/cuda_builtins.h"
