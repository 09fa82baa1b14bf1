#include "gpipe/schedule/footprint.h"

#include <algorithm>
#include <limits>

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

constexpr double kNeverFreed = std::numeric_limits<double>::infinity();

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
    if (bytes == 0) return;
    changes_.emplace_back(from, bytes);
    if (to != kNeverFreed) changes_.emplace_back(to, -bytes);
  }

  /// REQUIRES: called once, after the last add() and before the first at().
  void sum_up() {
    std::ranges::sort(changes_, {}, &Change::first);
    std::int64_t in_use = 0;
    for (auto& [time, bytes] : changes_) bytes = in_use += bytes;
  }

  std::int64_t at(double time) const {
    const auto next = std::ranges::upper_bound(changes_, time, {}, &Change::first);
    return next == changes_.begin() ? 0 : std::prev(next)->second;
  }

 private:
  using Change = std::pair<double, std::int64_t>;  // a time, and the bytes from then on
  std::vector<Change> changes_;
};

class Step {
 public:
  explicit Step(const std::vector<CellBytes>& bytes) : bytes_(bytes), cells_(bytes.size()), first_sum_(bytes.size()) {}

  void add(Span& span) {
    spans_.push_back(&span);
    const auto [kind, stage, micro_batch] = span.action;
    auto& cells = cells_[stage];
    cells.resize(std::max(cells.size(), static_cast<std::size_t>(micro_batch) + 1));
    CellSpans& cell = cells[micro_batch];
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
    for (const Span* span : spans_) hold(*span);
    for (auto& [worker, usage] : usages_) usage.sum_up();
    for (Span* span : spans_) {
      const Usage& usage = usages_[span->worker];
      const auto before = usage.at(span->start);
      // What the caller takes after the last forward is still allocated when that forward ends.
      const auto after = span->action.kind == Kind::F ? before + of(*span).kept() : usage.at(span->end);
      span->bytes = {before, std::max(before + extra_of(*span), after), after};
    }
  }

 private:
  bool is_first_sum(const Span& span) const { return first_sum_[span.action.stage] == &span; }

  std::int64_t extra_of(const Span& span) const {
    const CellBytes& bytes = bytes_[span.action.stage];
    const bool is_weights = span.action.kind == Kind::W;
    auto extra = of(span).extra;
    if (is_weights && bytes.splits) extra = bytes.weight_gradient_extra;
    if (!is_first_sum(span)) return extra;
    return std::max(extra, is_weights ? bytes.first_weight_gradient_extra : bytes.first_backward_extra);
  }

  /// What the action allocates, except that a W needs other memory while it runs.
  const ActionBytes& of(const Span& span) const {
    static const ActionBytes kNothing;
    const auto [kind, stage, micro_batch] = span.action;
    const CellBytes& bytes = bytes_[stage];
    if (kind == Kind::W) return kNothing;
    if (kind == Kind::R) return bytes.recompute;
    if (kind == Kind::I) return bytes.input_gradient;
    if (kind == Kind::B) return bytes.backward;
    return cells_[stage][micro_batch].recompute == nullptr ? bytes.forward : bytes.stored;
  }

  void hold(const Span& span) {
    const auto [kind, stage, micro_batch] = span.action;
    Usage& usage = usages_[span.worker];
    const Span* sends = cells_[stage][micro_batch].sends;
    for (const HeldBytes& held : of(span).held) {
      const double end = end_of(held, micro_batch);
      usage.add(held.bytes, span.end, held.until_own_backward && sends != nullptr ? std::max(end, sends->end) : end);
    }
    if (is_first_sum(span)) usage.add(bytes_[stage].parameters, span.end, kNeverFreed);
  }

  double end_of(const HeldBytes& held, int micro_batch) const {
    if (held.stage == HeldBytes::kUntilForwardsEnd) return forwards_end_;
    if (held.stage == HeldBytes::kNeverFreed) return kNeverFreed;
    const auto& cells = cells_[held.stage];
    if (static_cast<std::size_t>(micro_batch) >= cells.size()) return kNeverFreed;
    const auto& [forward, recompute, sends, ends] = cells[micro_batch];
    const Span* span = held.until == Kind::F                                 ? forward
                       : held.until == Kind::R                               ? recompute
                       : held.until == Kind::I || !bytes_[held.stage].splits ? sends
                                                                             : ends;
    return span == nullptr ? kNeverFreed : span->end;
  }

  const std::vector<CellBytes>& bytes_;
  std::vector<Span*> spans_;
  std::vector<std::vector<CellSpans>> cells_;  // by stage and micro-batch
  std::vector<const Span*> first_sum_;         // the first to add to the gradient sums, by stage
  std::map<int, Usage> usages_;                // by worker
  double forwards_end_ = 0;
};

void check(const ActionBytes& bytes, int stages) {
  for (const HeldBytes& held : bytes.held) {
    require(held.stage >= HeldBytes::kNeverFreed && held.stage < stages,
            "bytes are held until %c of stage %d, but there are %d stages", to_char(held.until), held.stage, stages);
  }
}

}  // namespace

void account(Timeline& timeline, const std::vector<CellBytes>& stages) {
  for (const CellBytes& it : stages) {
    for (const auto* action : {&it.forward, &it.stored, &it.recompute, &it.backward, &it.input_gradient}) {
      check(*action, static_cast<int>(stages.size()));
    }
  }
  std::map<int, Step> steps;
  for (Span& span : timeline.spans) {
    require(span.action.stage >= 0 && span.action.stage < std::ssize(stages),
            "the timeline has stage %d, but bytes are given for %d stages: give bytes for each stage",
            span.action.stage, stages.size());
    steps.try_emplace(span.step, stages).first->second.add(span);
  }
  for (auto& [number, step] : steps) step.account();
}

std::int64_t ActionBytes::kept() const {
  std::int64_t sum = 0;
  for (const HeldBytes& each : held) sum += each.bytes;
  return sum;
}

}  // namespace gpipe
