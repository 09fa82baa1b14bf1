#pragma once

namespace gpipe {

/// Sets how many threads operators on this thread use. Unlike at::set_num_threads, this leaves all other threads alone.
void set_intraop_threads_of_this_thread(int threads);

}  // namespace gpipe
