# gpipe_find_torch([prefix...] [PYTHON interpreter...])
#
# Defines the imported target gpipe::torch, and in the caller's scope GPIPE_TORCH_DIR, GPIPE_TORCH_VERSION, such as
# 2.15.0, and GPIPE_TORCH_SERIES, such as 2.15. Looks in the prefixes (a LibTorch folder, or the share/cmake folder
# inside one), then in the torch package of each interpreter; the first found is taken. An error when there is none, or
# when it is too old.
#
# find_package(Torch) would do for a CPU build of torch, but asks for a CUDA toolkit wherever torch was built with CUDA,
# which is what PyPI ships. Nothing here needs one.

cmake_policy(VERSION 3.25) # of this file, whatever the including project sets

# The versions that all tests pass with. Older ones do not work. cmake/setup.sh and python/packaging read this line.
set(GPIPE_TORCH_TESTED 2.10 2.11 2.12 2.13 2.14 2.15)
list(GET GPIPE_TORCH_TESTED 0 GPIPE_TORCH_MINIMUM)

function(gpipe_find_torch)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "PYTHON")
  set(candidates)
  foreach(prefix IN LISTS arg_UNPARSED_ARGUMENTS)
    list(APPEND candidates ${prefix} ${prefix}/../..)
  endforeach()
  foreach(python IN LISTS arg_PYTHON)
    foreach(isolated IN ITEMS "" -I) # pip hides the environment's packages from a build by PYTHONPATH, which -I ignores
      execute_process(
        COMMAND ${python} ${isolated} -c
                "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        OUTPUT_VARIABLE package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      list(APPEND candidates ${package})
    endforeach()
  endforeach()

  foreach(dir IN LISTS candidates)
    if(EXISTS ${dir}/lib/libtorch_cpu.so)
      file(REAL_PATH ${dir} dir)
      _gpipe_import_torch(${dir})
      return(PROPAGATE GPIPE_TORCH_DIR GPIPE_TORCH_VERSION GPIPE_TORCH_SERIES)
    endif()
  endforeach()
  list(JOIN arg_PYTHON ", " pythons)
  message(FATAL_ERROR "No torch found. Set GPIPE_PYTHON to a Python interpreter that has torch >= "
                      "${GPIPE_TORCH_MINIMUM}, or CMAKE_PREFIX_PATH to a LibTorch. Looked in: CMAKE_PREFIX_PATH "
                      "(${arg_UNPARSED_ARGUMENTS}), the torch package of: ${pythons}")
endfunction()

function(_gpipe_import_torch dir)
  set(version_header ${dir}/include/torch/headeronly/version.h)
  set(version unknown)
  if(EXISTS ${version_header})
    file(STRINGS ${version_header} lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    string(REGEX MATCHALL "[0-9]+" version "${lines}")
    list(JOIN version "." version)
  endif()
  if(version VERSION_LESS GPIPE_TORCH_MINIMUM)
    message(FATAL_ERROR "torch in ${dir} is too old: ${version}, but gpipe needs ${GPIPE_TORCH_MINIMUM} or newer")
  endif()
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" series ${version})
  if(NOT series IN_LIST GPIPE_TORCH_TESTED)
    message(WARNING "gpipe is not tested with torch ${version}, only with: ${GPIPE_TORCH_TESTED}")
  endif()

  if(NOT TARGET gpipe::torch)
    message(STATUS "Found torch ${version}: ${dir}")
    add_library(gpipe::torch INTERFACE IMPORTED GLOBAL)
    target_compile_features(gpipe::torch INTERFACE cxx_std_20)
    target_include_directories(gpipe::torch INTERFACE ${dir}/include ${dir}/include/torch/csrc/api/include)
    # libstdc++ goes first, so that programs use its std::filesystem: libtorch exports a copy of its own that crashes.
    # Nothing refers to a symbol of libtorch.so, but loading it is what brings in the CUDA kernels where there are any.
    target_link_libraries(
      gpipe::torch INTERFACE stdc++ "-Wl,--push-state,--no-as-needed,${dir}/lib/libtorch.so,--pop-state"
                             ${dir}/lib/libtorch_cpu.so ${dir}/lib/libc10.so)
  endif()
  set(GPIPE_TORCH_DIR ${dir} PARENT_SCOPE)
  set(GPIPE_TORCH_VERSION ${version} PARENT_SCOPE)
  set(GPIPE_TORCH_SERIES ${series} PARENT_SCOPE)
endfunction()
