#include "gpipe/run/call.h"

#include <exception>

#include "absl/strings/str_cat.h"
#include "gpipe/base/checks.h"

namespace gpipe {

Call::Call(Pipeline& pipeline) : pipeline_(pipeline), turn_(pipeline) {
  if (std::exchange(pipeline.calls().has_call, true)) {
    throw_error(
        "this pipeline was called within another call of it on the same thread, such as by a signal handler; make the "
        "call afterwards");
  }
}

Call::~Call() {
  pipeline_.calls().has_call = false;
  for (std::size_t s = 0; s < before_.size(); ++s) pipeline_.stages()[s].state.call = nullptr;
}

void Call::save(const std::vector<ParameterSinks>& sinks) {
  auto& stages = pipeline_.stages();
  before_.resize(stages.size());
  for (std::size_t s = 0; s < stages.size(); ++s) {
    before_[s] = stages[s].state.save(stages[s], sinks[s].own());
    stages[s].state.call = &before_[s];
  }
  draw_.emplace();
}

Agreement Call::agree(Proposal proposal) {
  has_answered_ = true;
  key_ = proposal.key;
  return pipeline_.team().agree(std::move(proposal));
}

// Makes the call throw on the other ranks too.
void Call::report() noexcept try {
  auto& team = pipeline_.team();
  if (team.size() == 1) return;
  const auto message = message_of(std::current_exception());
  if (has_started_) {
    team.fail(absl::StrCat("rank ", team.rank(), " failed in ", to_string(key_), ": ", message));
  } else if (!has_answered_) {
    team.withdraw(message);
  }
} catch (...) {  // the error that is being handled says more
}

void Call::fail() noexcept {
  report();
  for (std::size_t s = 0; s < before_.size(); ++s) StageState::restore_after_error(pipeline_.stages()[s], before_[s]);
  if (draw_) draw_->undo();
}

}  // namespace gpipe
