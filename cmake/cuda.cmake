# Device code. Kernels that are the same on every architecture (src/*/*_cuda.cu) are compiled for all of them in one
# object; a kernel that uses the instructions of one architecture (src/*/*_sm90.cu) for that one.
#   mxflash_device_test(name): tests/<name>.cu, run where a card is, skipped elsewhere.
#   mxflash_tcgen05_test(name): tests/<name>_card_test.cu, which tests kernels of Blackwell, twice: <name>_card_test for
#     such a card, and <name>_emulated_test for one of Hopper, tcgen05 in software.
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/cmake/strict_nvcc)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # CMake 3.25 does not know that nvcc 12 and later take C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()

add_custom_target(mxflash_device COMMENT "All device code")

# mxflash_device_objects(name ARCHS ... SOURCES ...)
function(mxflash_device_objects name)
  cmake_parse_arguments(ARG "" "" "ARCHS;SOURCES" ${ARGN})
  add_library(${name} OBJECT ${ARG_SOURCES})
  # --fmad=false: bytes are equal to the CPU's only with one rounding per operation; kernels ask for FMAs by name.
  target_compile_options(${name} PRIVATE
    --expt-relaxed-constexpr --fmad=false -Werror=all-warnings -Xptxas=-warn-spills)
  foreach(arch ${ARG_ARCHS})
    target_compile_options(${name} PRIVATE "SHELL:-gencode=arch=compute_${arch}a,code=sm_${arch}a")
  endforeach()
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_compile_definitions(${name} PRIVATE MXFLASH_CUDA=1)
  add_dependencies(mxflash_device ${name})
endfunction()

mxflash_device_objects(mxflash_cuda ARCHS 90 100 103 SOURCES
  src/quantize/dequantize_cuda.cu
  src/quantize/mean_cuda.cu
  src/quantize/quantize_cuda.cu
  src/quantize/quantize_rows_cuda.cu
  src/rmsnorm/rmsnorm_bwd_cuda.cu
  src/rmsnorm/rmsnorm_cuda.cu
  src/attention/attention_combine_cuda.cu
  src/attention/attention_plan_cuda.cu
  src/operator/lse_cuda.cu
  src/runtime/operand_image_cuda.cu)
mxflash_device_objects(mxflash_sm90 ARCHS 90 SOURCES
  src/attention/attention_bwd_post_sm90.cu
  src/attention/attention_bwd_pre_sm90.cu
  src/attention/attention_bwd_rows_sm90_bf16.cu
  src/attention/attention_bwd_sm90.cu
  src/attention/attention_bwd_sm90_bf16.cu
  src/attention/attention_fwd_sm90.cu
  src/attention/attention_fwd_sm90_bf16.cu
  src/attention/bf16_image_cuda.cu
  src/attention/mx_rows_cuda.cu
  src/attention/pack_query_cuda.cu)
mxflash_device_objects(mxflash_sm100 ARCHS 100 103 SOURCES
  src/attention/attention_bwd_sm100.cu
  src/attention/attention_fwd_sm100.cu
  src/attention/attention_fwd_sm100_wide.cu)

target_sources(mxflash PRIVATE src/runtime/cuda.cpp src/runtime/tensor_map.cpp $<TARGET_OBJECTS:mxflash_cuda>
  $<TARGET_OBJECTS:mxflash_sm90> $<TARGET_OBJECTS:mxflash_sm100>)
target_compile_definitions(mxflash PRIVATE MXFLASH_CUDA=1)
target_link_libraries(mxflash PUBLIC CUDA::cudart_static)

# The loops of the sm100 kernels as compiled: as many block-scaled MMAs as `mxflash model` says, no registers in local
# memory, and the instruction counts that the model rests on. Part of mxflash_device where a disassembler is.
if(TARGET mxflash_sm100)
  find_program(MXFLASH_CUOBJDUMP cuobjdump HINTS ${CUDAToolkit_BIN_DIR})
  find_package(Python3 COMPONENTS Interpreter)
  if(MXFLASH_CUOBJDUMP AND Python3_FOUND)
    add_custom_command(OUTPUT sass_counts.stamp
      COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/sass_counts.py $<TARGET_OBJECTS:mxflash_sm100>
              --cuobjdump ${MXFLASH_CUOBJDUMP} --check ${PROJECT_SOURCE_DIR}/tools/model_counts.json
      COMMAND ${CMAKE_COMMAND} -E touch sass_counts.stamp
      DEPENDS $<TARGET_OBJECTS:mxflash_sm100> ${PROJECT_SOURCE_DIR}/tools/sass_counts.py
              ${PROJECT_SOURCE_DIR}/tools/model_counts.json
      COMMAND_EXPAND_LISTS VERBATIM)
    add_custom_target(mxflash_sass_counts DEPENDS sass_counts.stamp)
    add_dependencies(mxflash_device mxflash_sass_counts)
  else()
    message(STATUS "sass_counts.py will not check the sm100 kernels: it needs Python and cuobjdump with nvdisasm beside it (PyPI nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
  endif()
endif()

function(mxflash_device_test name)
  mxflash_device_objects(${name}_objects ARCHS 90 100 SOURCES tests/${name}.cu)
  target_include_directories(${name}_objects PRIVATE $<TARGET_PROPERTY:GTest::gtest,INTERFACE_INCLUDE_DIRECTORIES>)
  add_executable(${name} $<TARGET_OBJECTS:${name}_objects>)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(${name} PRIVATE mxflash GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "sm90;sm100;blackwell" SKIP_REGULAR_EXPRESSION "SKIPPED")
endfunction()

function(mxflash_tcgen05_test name)
  set(source tests/${name}_card_test.cu)
  mxflash_device_objects(${name}_card_test_objects ARCHS 100 103 SOURCES ${source})
  add_library(${name}_emulated_test_objects OBJECT ${source})
  # Spills cost nothing that is measured here.
  target_compile_options(${name}_emulated_test_objects PRIVATE
    --expt-relaxed-constexpr --fmad=false -Werror=all-warnings "SHELL:-gencode=arch=compute_90a,code=sm_90a")
  target_compile_definitions(${name}_emulated_test_objects PRIVATE MXFLASH_CUDA=1 MXFLASH_TCGEN05_EMULATED)
  add_dependencies(mxflash_device ${name}_emulated_test_objects)
  foreach(test ${name}_card_test ${name}_emulated_test)
    target_include_directories(${test}_objects PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include
      ${PROJECT_SOURCE_DIR} $<TARGET_PROPERTY:GTest::gtest,INTERFACE_INCLUDE_DIRECTORIES>)
    add_executable(${test} $<TARGET_OBJECTS:${test}_objects>)
    set_target_properties(${test} PROPERTIES LINKER_LANGUAGE CXX)
    target_link_libraries(${test} PRIVATE mxflash_kit mxflash GTest::gtest_main)
    add_test(NAME ${test} COMMAND ${test})
    set_tests_properties(${test} PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED")
  endforeach()
  set_tests_properties(${name}_card_test PROPERTIES LABELS "blackwell;sm100")
  set_tests_properties(${name}_emulated_test PROPERTIES LABELS "sm90;sm100")
endfunction()

if(MXFLASH_TESTS)
  mxflash_device_test(mx_device_test)
  mxflash_device_objects(tcgen05_gate ARCHS 100 103 SOURCES tests/tcgen05_gate.cu)
  mxflash_tcgen05_test(tcgen05)
  mxflash_tcgen05_test(attention_fwd_sm100)
  mxflash_tcgen05_test(attention_bwd_sm100)
  # Host code that calls the library with tensors on a card.
  foreach(test attention_bwd_bf16_device_test attention_bwd_device_test attention_bwd_records_test attention_device_test
          attention_bf16_device_test operator_device_test quantize_device_test rmsnorm_device_test
          rmsnorm_bwd_device_test)
    mxflash_test(${test} SOURCES ${PROJECT_SOURCE_DIR}/tests/${test}.cpp LABELS sm90)
    target_link_libraries(${test} PRIVATE CUDA::cudart_static)
    set_tests_properties(${test} PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED")
  endforeach()
  foreach(part calls rules sums)
    target_sources(attention_bwd_device_test PRIVATE ${PROJECT_SOURCE_DIR}/tests/attention_bwd_${part}_device_test.cpp)
  endforeach()
  foreach(test operator_device_test quantize_device_test rmsnorm_device_test rmsnorm_bwd_device_test)
    set_tests_properties(${test} PROPERTIES LABELS "sm90;blackwell")
  endforeach()
endif()
