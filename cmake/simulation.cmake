# Kernels of Blackwell on the host, without a CUDA toolkit: docs/blackwell.md, "How the simulation works".
#   mxflash_sim_test(name [SOURCES ...]): tests/<name>.cpp, or the sources, compiled with the host forms of ptx/*.cuh and
#   with CUDA's built-ins; links the simulator, the library and the kit.
set(MXFLASH_SIMULATOR_HEADERS ${PROJECT_SOURCE_DIR}/src/simulator ${PROJECT_SOURCE_DIR}/src)

add_library(mxflash_simulator STATIC EXCLUDE_FROM_ALL
  src/simulator/cuda_builtins.cpp
  src/simulator/fiber.cpp
  src/simulator/machine.cpp
  src/simulator/order.cpp
  src/simulator/tensor_core.cpp
  src/simulator/tensor_map.cpp)
target_include_directories(mxflash_simulator PUBLIC ${MXFLASH_SIMULATOR_HEADERS})
# As nvcc: its built-ins are there without being asked for. Its pragmas mean nothing to others.
target_compile_options(mxflash_simulator PUBLIC
  -include ${PROJECT_SOURCE_DIR}/src/simulator/cuda_builtins.h -Wno-unknown-pragmas -Wno-psabi)
target_link_libraries(mxflash_simulator PUBLIC mxflash PRIVATE mxflash_warnings)

function(mxflash_sim_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  if(NOT ARG_SOURCES)
    set(ARG_SOURCES ${name}.cpp)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE mxflash_simulator mxflash_kit GTest::gtest_main mxflash_warnings)
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O2>)
  target_compile_definitions(${name} PRIVATE MXFLASH_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS sm100 TIMEOUT 900)
endfunction()
