#include "gpipe/pipeline.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace gpipe {
namespace {

constexpr std::size_t kPrograms = 16;

}  // namespace

Pipeline::Pipeline(std::vector<Stage> stages, std::vector<Edge> edges, SharedBuffers shared, int intraop_threads,
                   LanguageBinding binding)
    : stages_(std::move(stages)),
      edges_(std::move(edges)),
      shared_buffers_(std::move(shared)),
      intraop_threads_(intraop_threads),
      binding_(std::move(binding)),
      executor_(static_cast<int>(stages_.size()), binding_.poll) {
  for (const auto& stage : stages_) streams_.push_back(new_stream(stage.device));
  for (const auto& edge : edges_) {
    const auto from = stages_[edge.from].device;
    const auto to = stages_[edge.to].device;
    links_.push_back(new_link(from, to));
    back_links_.push_back(new_link(to, from));
  }
}

Mutex& Pipeline::turn() {
  executor_.check_caller();
  return turn_;
}

std::shared_ptr<const Program> Pipeline::program(int micro_batches, Checkpoint checkpoint, bool backward) {
  const Key key{micro_batches, checkpoint, backward};
  MutexLock lock(mutex_);
  const auto found =
      std::find_if(programs_.begin(), programs_.end(), [&](const auto& known) { return known.first == key; });
  if (found != programs_.end()) {
    std::rotate(found, found + 1, programs_.end());
  } else {
    auto made = std::make_shared<const Program>(gpipe_program(count(), micro_batches, edges_, checkpoint, backward));
    if (programs_.size() == kPrograms) programs_.erase(programs_.begin());
    programs_.emplace_back(key, std::move(made));
  }
  return programs_.back().second;
}

void Pipeline::set_error(std::optional<ErrorInfo> error) {
  MutexLock lock(mutex_);
  error_ = std::move(error);
}

std::optional<ErrorInfo> Pipeline::error() const {
  MutexLock lock(mutex_);
  return error_;
}

void Pipeline::set_timeline(std::shared_ptr<Timeline> timeline) {
  MutexLock lock(mutex_);
  timeline_ = std::move(timeline);
  steps_ = 0;
}

Pipeline::Recording Pipeline::next_recording() {
  MutexLock lock(mutex_);
  if (!timeline_) return {};
  return {timeline_, steps_++};
}

}  // namespace gpipe
