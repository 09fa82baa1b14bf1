#include "gpipe/options.h"

#include <ATen/Parallel.h>

// Functions of libraries that come with LibTorch without headers. Weak: a LibTorch without OpenMP or MKL lacks them.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int threads);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);
}

namespace gpipe {

void set_intraop_threads_of_this_thread(int threads) {
  // A thread's first parallel region sets its number of threads to the process's. Run this initialisation now, so that
  // it does not undo the setting later. lazy_init_num_threads() is inline, and its flag exists twice: in this library,
  // and in libtorch, where at::get_num_threads() sets it.
  at::internal::lazy_init_num_threads();
  at::get_num_threads();
  if (omp_set_num_threads != nullptr) omp_set_num_threads(threads);
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(threads);
}

}  // namespace gpipe
