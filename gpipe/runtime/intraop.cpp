#include "gpipe/runtime/intraop.h"

#include <ATen/Parallel.h>

// Both live in libraries that libtorch brings along, under names that no header of it declares; a LibTorch built
// without OpenMP or MKL lacks them.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int threads);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);
}

namespace gpipe {

void set_intraop_threads_of_this_thread(int threads) {
  // The first parallel region of a thread sets it to the process's number; let that be over. The function that does so
  // is inline, with a flag of its own in libtorch, which at::get_num_threads() sets, and one in whatever else inlines
  // it.
  at::internal::lazy_init_num_threads();
  at::get_num_threads();
  if (omp_set_num_threads != nullptr) omp_set_num_threads(threads);
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(threads);
}

}  // namespace gpipe
