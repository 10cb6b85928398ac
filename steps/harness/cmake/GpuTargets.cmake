# Finds nvcc, if there is one, and decides for which GPUs each kernel file is built.
#
# FLASHSTEPS_GPU     all | native | a compute capability such as 86 | off
# FLASHSTEPS_HAS_GPU whether the GPU device is built
#
# A kernel file says itself which GPU it needs: `.min_sm = 75` in its registration. With `all` it gets machine code for
# that one and the common newer ones, and PTX that the driver compiles for those to come. Chapter 08's instructions
# (wgmma, setmaxnreg) exist on sm_90a alone, and in no PTX that a later GPU takes.

set(FLASHSTEPS_HAS_GPU FALSE)
if(FLASHSTEPS_GPU STREQUAL "off")
  return()
endif()

find_program(FLASHSTEPS_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT FLASHSTEPS_NVCC)
  message(STATUS "No nvcc: the GPU device is not built. Kernels run on the CPU executor.")
  return()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${FLASHSTEPS_NVCC})
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know yet that nvcc has it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -lineinfo")
set(FLASHSTEPS_HAS_GPU TRUE)

set(FLASHSTEPS_SM "")
if(FLASHSTEPS_GPU STREQUAL "native")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE found
                  ERROR_QUIET RESULT_VARIABLE failed)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" found "${found}")
  string(REPLACE "." "" FLASHSTEPS_SM "${found}")
  if(failed OR NOT FLASHSTEPS_SM)
    message(FATAL_ERROR "FLASHSTEPS_GPU=native: nvidia-smi names no GPU here. Give its compute capability, e.g. "
                        "-DFLASHSTEPS_GPU=86, or leave the option out to build for all.")
  endif()
elseif(FLASHSTEPS_GPU MATCHES "^[0-9]+$")
  set(FLASHSTEPS_SM ${FLASHSTEPS_GPU})
elseif(NOT FLASHSTEPS_GPU STREQUAL "all")
  message(FATAL_ERROR "FLASHSTEPS_GPU is '${FLASHSTEPS_GPU}'; it may be all, native, off or a number such as 86")
endif()

# The -gencode options of code that needs at least GPU `min_sm`; empty if the GPU asked for is older.
function(gencode_for_sm min_sm result)
  if(min_sm EQUAL 90)
    set(architectures 90a)
  else()
    set(architectures 75 80 90)
  endif()
  set(ptx TRUE)
  if(FLASHSTEPS_SM)
    set(ptx FALSE)
    set(architectures ${FLASHSTEPS_SM})
    if(min_sm EQUAL 90 AND FLASHSTEPS_SM EQUAL 90)
      set(architectures 90a)
    elseif(min_sm EQUAL 90 OR FLASHSTEPS_SM LESS min_sm)
      set(architectures "")
    endif()
  endif()
  set(options "")
  foreach(sm IN LISTS architectures)
    string(REGEX MATCH "[0-9]+" number ${sm})
    if(number GREATER_EQUAL min_sm)
      list(APPEND options "-gencode=arch=compute_${sm},code=sm_${sm}")
    endif()
  endforeach()
  if(ptx AND NOT min_sm EQUAL 90)
    list(APPEND options "-gencode=arch=compute_90,code=compute_90")
  endif()
  set(${result} "${options}" PARENT_SCOPE)
endfunction()

# The same for a chapter's kernel file, from the .min_sm in its text.
function(gencode_for_kernel_file file result)
  file(STRINGS ${file} line REGEX "\\.min_sm *= *[0-9]+" LIMIT_COUNT 1)
  if(NOT line)
    message(FATAL_ERROR "${file}: its registration has no .min_sm; write the oldest GPU that it runs on, e.g. 75")
  endif()
  string(REGEX REPLACE ".*\\.min_sm *= *([0-9]+).*" "\\1" min_sm "${line}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  gencode_for_sm(${min_sm} options)
  if(NOT options)
    message(STATUS "${file} needs sm_${min_sm}: not built for sm_${FLASHSTEPS_SM}, runs on the CPU executor only")
  endif()
  set(${result} "${options}" PARENT_SCOPE)
endfunction()

gencode_for_sm(75 FLASHSTEPS_COMMON_GENCODE)
