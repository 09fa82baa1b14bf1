#pragma once

namespace gpipe {

/// Sets how many threads one operator may use when it is called on this thread. Other threads, and threads started
/// later, keep theirs: at::set_num_threads would change both.
void set_intraop_threads_of_this_thread(int threads);

}  // namespace gpipe
