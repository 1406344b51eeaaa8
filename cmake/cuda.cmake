# Device code: one target per architecture, because each uses instructions that only exist with its 'a' suffix.
#   mxflash_device_test(name): tests/<name>.cu as <name>_sm90 and <name>_sm100, skipped where no such card is.
enable_language(CUDA)
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_STANDARD 20)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # CMake 3.25 does not know that nvcc 12 and later take C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()

add_custom_target(mxflash_device COMMENT "All device code")

function(mxflash_device_options target arch)
  # --fmad=false: bytes are equal to the CPU's only with one rounding per operation; kernels ask for FMAs by name.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --fmad=false -Werror=all-warnings
    -gencode=arch=compute_${arch}a,code=sm_${arch}a -Xptxas=-warn-spills>)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
endfunction()

function(mxflash_device_test name)
  foreach(arch 90 100)
    set(target ${name}_sm${arch})
    add_executable(${target} tests/${name}.cu)
    mxflash_device_options(${target} ${arch})
    target_compile_definitions(${target} PRIVATE MXFLASH_TEST_ARCH=${arch})
    target_link_libraries(${target} PRIVATE mxflash GTest::gtest_main)
    add_dependencies(mxflash_device ${target})
    add_test(NAME ${target} COMMAND ${target})
    set_tests_properties(${target} PROPERTIES LABELS sm${arch})
  endforeach()
endfunction()

if(MXFLASH_TESTS)
  mxflash_device_test(mx_device_test)
endif()
