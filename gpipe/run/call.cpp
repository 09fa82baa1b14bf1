#include "gpipe/run/call.h"

#include <exception>

#include "absl/strings/str_cat.h"

namespace gpipe {

void Call::take_turn() {
  if (!turn_) turn_.emplace(pipeline_.call_mutex());
}

void Call::save(const std::vector<ParameterSinks>& sinks) {
  for (auto& stage : pipeline_.stages()) before_.push_back(stage.state.hold(stage, sinks[stage.index].own()));
  draw_.emplace();
}

Agreement Call::agree(Proposal proposal) {
  take_turn();
  has_answered_ = true;
  key_ = proposal.key;
  return pipeline_.team().agree(std::move(proposal));
}

void Call::report() noexcept try {
  auto& team = pipeline_.team();
  if (std::exchange(has_reported_, true) || team.size() == 1) return;
  const auto message = message_of(std::current_exception());
  if (has_started_) {
    team.fail(absl::StrCat("rank ", team.rank(), " failed in ", to_string(key_), ": ", message));
  } else if (!has_answered_) {
    take_turn();
    team.withdraw(message);
  }
} catch (...) {  // the error that is being handled says more
}

void Call::fail() noexcept {
  report();
  for (std::size_t s = 0; s < before_.size(); ++s) {
    auto& stage = pipeline_.stages()[s];
    stage.state.restore_after_error(stage, before_[s]);
  }
  if (draw_) draw_->undo();
}
}  // namespace gpipe
