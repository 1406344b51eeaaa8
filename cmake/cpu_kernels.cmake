# Kernels of backend `cpu`: every source here is compiled once per instruction set, chosen at run time (src/simd/isa.h).
# No -m flag: the sources themselves say where an instruction set may be used.
set(MXFLASH_CPU_KERNELS
  src/attention/attention_bwd_cpu_kernel.cpp
  src/attention/attention_decode_cpu_kernel.cpp
  src/attention/attention_fwd_cpu_kernel.cpp
  src/gemm/gemm_cpu_kernel.cpp
  src/quantize/quantize_cpu_kernel.cpp
  src/rmsnorm/rmsnorm_bwd_cpu_kernel.cpp
  src/rmsnorm/rmsnorm_cpu_kernel.cpp)

set(MXFLASH_CPU_KERNELS_WITH_BF16
  src/attention/attention_bwd_cpu_kernel.cpp
  src/attention/attention_fwd_cpu_kernel.cpp)

set(isas PORTABLE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND isas AVX2 AVX512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  list(APPEND isas NEON)
endif()
# mxflash_for_isa(target isa sources...): adds the sources to the target, compiled for one instruction set.
function(mxflash_for_isa target isa)
  string(TOLOWER ${target}_${isa} objects)
  add_library(${objects} OBJECT ${ARGN})
  target_compile_features(${objects} PRIVATE cxx_std_20)
  target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(${objects} PRIVATE MXFLASH_ISA_${isa})
  target_link_libraries(${objects} PRIVATE mxflash_warnings)
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # AVX-512 intrinsics pass an undefined vector on purpose (GCC bug 105593).
    target_compile_options(${objects} PRIVATE -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
endfunction()
# mxflash_per_isa(target sources...): the same for all of them.
function(mxflash_per_isa target)
  foreach(isa ${isas})
    mxflash_for_isa(${target} ${isa} ${ARGN})
  endforeach()
endfunction()

mxflash_per_isa(mxflash ${MXFLASH_CPU_KERNELS})
if(AVX512 IN_LIST isas)
  mxflash_for_isa(mxflash AVX512_BF16 ${MXFLASH_CPU_KERNELS_WITH_BF16})
endif()
