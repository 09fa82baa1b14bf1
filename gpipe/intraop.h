#pragma once

namespace gpipe {

/// Sets the number of threads that operators called on this thread use. Unlike at::set_num_threads, this does not
/// affect other threads, including those started later.
void set_intraop_threads_of_this_thread(int threads);

}  // namespace gpipe
