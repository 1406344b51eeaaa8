# cmake --install: library, headers, and a package, so that find_package(mxflash) gives the target mxflash::mxflash.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(MXFLASH_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/mxflash)
install(TARGETS mxflash EXPORT mxflash-targets)
install(DIRECTORY include/mxflash DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT mxflash-targets NAMESPACE mxflash:: DESTINATION ${MXFLASH_PACKAGE_DIR})
set(MXFLASH_FIND_CUDA "")
if(MXFLASH_CUDA)
  set(MXFLASH_FIND_CUDA "find_dependency(CUDAToolkit)\n")
endif()
file(WRITE ${PROJECT_BINARY_DIR}/mxflash-config.cmake
  "include(CMakeFindDependencyMacro)\nfind_dependency(Threads)\n${MXFLASH_FIND_CUDA}"
  "include(\${CMAKE_CURRENT_LIST_DIR}/mxflash-targets.cmake)\n")
write_basic_package_version_file(${PROJECT_BINARY_DIR}/mxflash-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/mxflash-config.cmake ${PROJECT_BINARY_DIR}/mxflash-config-version.cmake
        DESTINATION ${MXFLASH_PACKAGE_DIR})
