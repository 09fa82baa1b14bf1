#include "gpipe/schedule/footprint.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_format.h"

namespace gpipe {
namespace {

constexpr double kNeverFreed = std::numeric_limits<double>::infinity();

/// The spans of one cell.
struct CellSpans {
  Span* forward = nullptr;
  Span* recompute = nullptr;
  Span* sends = nullptr;  ///< B or I
  Span* ends = nullptr;   ///< B or W
};

/// The bytes of one worker over time.
class Usage {
 public:
  void add(std::int64_t bytes, double from, double to) {
    changes_[from] += bytes;
    changes_[to] -= bytes;
  }

  /// REQUIRES: called once, after the last add() and before the first at().
  void sum_up() {
    std::int64_t in_use = 0;
    for (auto& [time, bytes] : changes_) bytes = in_use += bytes;
  }

  std::int64_t at(double time) const {
    const auto next = changes_.upper_bound(time);
    return next == changes_.begin() ? 0 : std::prev(next)->second;
  }

 private:
  std::map<double, std::int64_t> changes_;
};

/// The spans of one step.
class Step {
 public:
  explicit Step(const std::vector<CellBytes>& bytes) : bytes_(bytes) {}

  void add(Span& span) {
    spans_.push_back(&span);
    const auto [kind, stage, micro_batch] = span.action;
    CellSpans& cell = cells_[{stage, micro_batch}];
    if (kind == Kind::F) cell.forward = &span;
    if (kind == Kind::R) cell.recompute = &span;
    if (kind == Kind::B || kind == Kind::I) cell.sends = &span;
    if (kind == Kind::B || kind == Kind::W) cell.ends = &span;
    if (kind == Kind::F) forwards_end_ = std::max(forwards_end_, span.end);
    const Span*& first = first_sum_[stage];
    const bool sums = kind == Kind::B || kind == (bytes_[stage].splits ? Kind::W : Kind::I);
    if (sums && (first == nullptr || span.end < first->end)) first = &span;
  }

  void account() {
    for (const auto& [key, cell] : cells_) hold(key.first, key.second, cell);
    for (auto& [worker, usage] : usages_) usage.sum_up();
    for (Span* span : spans_) {
      const Usage& usage = usages_[span->worker];
      const auto before = usage.at(span->start);
      // What the caller takes after the last forward is still allocated when that forward ends.
      const auto after = span->action.kind == Kind::F ? before + of(*span).kept() : usage.at(span->end);
      const auto extra =
          span == first_sum_[span->action.stage] ? std::max(extra_of(*span), first_extra_of(*span)) : extra_of(*span);
      span->bytes = {before, std::max(before + extra, after), after};
    }
  }

 private:
  std::int64_t extra_of(const Span& span) const {
    const CellBytes& bytes = bytes_[span.action.stage];
    if (span.action.kind != Kind::W) return of(span).extra;
    return bytes.splits ? bytes.weight_gradient_extra : 0;
  }

  std::int64_t first_extra_of(const Span& span) const {
    const CellBytes& bytes = bytes_[span.action.stage];
    return span.action.kind == Kind::W ? bytes.first_weight_gradient_extra : bytes.first_backward_extra;
  }

  /// REQUIRES: not of a W.
  const ActionBytes& of(const Span& span) const {
    const auto [kind, stage, micro_batch] = span.action;
    const CellBytes& bytes = bytes_[stage];
    if (kind == Kind::R) return bytes.recompute;
    if (kind == Kind::I) return bytes.splits ? bytes.input_gradient : bytes.backward;
    if (kind != Kind::F) return bytes.backward;
    return cells_.at({stage, micro_batch}).recompute == nullptr ? bytes.forward : bytes.stored;
  }

  void hold(int stage, int micro_batch, const CellSpans& cell) {
    for (const Span* span : {cell.forward, cell.recompute, cell.sends}) {
      if (span == nullptr) continue;
      Usage& usage = usages_[span->worker];
      for (const Held& held : of(*span).held) usage.add(held.bytes, span->end, end_of(held, micro_batch));
    }
    for (const Span* span : {cell.sends, cell.ends}) {
      if (span == nullptr || span != first_sum_[stage]) continue;
      usages_[span->worker].add(bytes_[stage].parameters, span->end, kNeverFreed);
      break;
    }
  }

  double end_of(const Held& held, int micro_batch) const {
    if (held.stage == Held::kForwards) return forwards_end_;
    const auto found = cells_.find({held.stage, micro_batch});
    if (found == cells_.end()) return kNeverFreed;
    const CellSpans& cell = found->second;
    const Span* span = held.until == Kind::F                                 ? cell.forward
                       : held.until == Kind::R                               ? cell.recompute
                       : held.until == Kind::I || !bytes_[held.stage].splits ? cell.sends
                                                                             : cell.ends;
    return span == nullptr ? kNeverFreed : span->end;
  }

  const std::vector<CellBytes>& bytes_;
  std::vector<Span*> spans_;
  std::map<std::pair<int, int>, CellSpans> cells_;  // by stage and micro-batch
  std::map<int, const Span*> first_sum_;            // the first to add to the gradient sums, by stage
  std::map<int, Usage> usages_;                     // by worker
  double forwards_end_ = 0;
};

void check(const Span& span, std::size_t stages) {
  if (static_cast<std::size_t>(span.action.stage) < stages) return;
  throw std::invalid_argument(
      absl::StrFormat("the timeline has stage %d, but bytes are given for %d stages: give bytes for each stage",
                      span.action.stage, stages));
}

void check(const ActionBytes& bytes, int stages) {
  for (const Held& held : bytes.held) {
    if (held.stage >= Held::kNeverFreed && held.stage < stages) continue;
    throw std::invalid_argument(absl::StrFormat("bytes are held until %c of stage %d, but there are %d stages",
                                                to_char(held.until), held.stage, stages));
  }
}

}  // namespace

void account(Timeline& timeline, const std::vector<CellBytes>& stages) {
  std::map<int, Step> steps;
  for (const Span& span : timeline.spans) check(span, stages.size());
  for (const CellBytes& bytes : stages) {
    for (const ActionBytes* action :
         {&bytes.forward, &bytes.stored, &bytes.recompute, &bytes.backward, &bytes.input_gradient}) {
      check(*action, static_cast<int>(stages.size()));
    }
  }
  for (Span& span : timeline.spans) steps.try_emplace(span.step, stages).first->second.add(span);
  for (auto& [number, step] : steps) step.account();
}

std::int64_t ActionBytes::kept() const {
  std::int64_t sum = 0;
  for (const Held& each : held) sum += each.bytes;
  return sum;
}

}  // namespace gpipe
