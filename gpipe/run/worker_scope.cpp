#include "gpipe/run/worker_scope.h"

#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>

#include "gpipe/tensors/intraop.h"

namespace gpipe {
namespace {

const at::ThreadLocalState& enter_worker(const Pipeline& pipeline, const at::ThreadLocalState& state) {
  if (const auto& enter = pipeline.binding().enter_worker) enter();
  return state;
}

}  // namespace

CallerStateScope::CallerStateScope(const at::ThreadLocalState& state) : guard_(state) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

WorkerScope::WorkerScope(const Pipeline& pipeline, int worker, const at::ThreadLocalState& state,
                         const ByteCounter* counter)
    : state_(enter_worker(pipeline, state)), stream_(pipeline.stream_of_worker(worker)), counted_(counter, worker) {
  // A cached cast would join the graphs of two cells.
  at::autocast::set_autocast_cache_enabled(false);
  if (pipeline.device_of_worker(worker).is_cpu()) set_intraop_threads_of_this_thread(pipeline.intraop_threads());
}

}  // namespace gpipe
