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
    if (bytes == 0) return;
    changes_.emplace_back(from, bytes);
    if (to != kNeverFreed) changes_.emplace_back(to, -bytes);
  }

  /// REQUIRES: called once, after the last add() and before the first at().
  void sum_up() {
    std::sort(changes_.begin(), changes_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::int64_t in_use = 0;
    for (auto& [time, bytes] : changes_) bytes = in_use += bytes;
  }

  std::int64_t at(double time) const {
    const auto next = std::upper_bound(changes_.begin(), changes_.end(), time,
                                       [](double value, const auto& change) { return value < change.first; });
    return next == changes_.begin() ? 0 : std::prev(next)->second;
  }

 private:
  std::vector<std::pair<double, std::int64_t>> changes_;  // times, and the bytes from then on
};

/// The spans of one step.
class Step {
 public:
  /// For spans of at most that many micro-batches and workers.
  Step(const std::vector<CellBytes>& bytes, int micro_batches, int workers)
      : bytes_(bytes),
        micro_batches_(micro_batches),
        cells_(bytes.size() * micro_batches),
        first_sum_(bytes.size()),
        usages_(workers) {}

  void add(Span& span) {
    spans_.push_back(&span);
    const auto [kind, stage, micro_batch] = span.action;
    CellSpans& cell = this->cell(stage, micro_batch);
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
    for (int stage = 0; stage < static_cast<int>(bytes_.size()); ++stage) {
      for (int m = 0; m < micro_batches_; ++m) hold(stage, m, cell(stage, m));
    }
    for (auto& usage : usages_) usage.sum_up();
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
    if (kind == Kind::I) return bytes.input_gradient;
    if (kind != Kind::F) return bytes.backward;
    return cell(stage, micro_batch).recompute == nullptr ? bytes.forward : bytes.stored;
  }

  void hold(int stage, int micro_batch, const CellSpans& cell) {
    for (const Span* span : {cell.forward, cell.recompute, cell.sends}) {
      if (span == nullptr) continue;
      Usage& usage = usages_[span->worker];
      for (const HeldBytes& held : of(*span).held) {
        const double end = end_of(held, micro_batch);
        const bool waits = held.until_own_backward && cell.sends != nullptr;
        usage.add(held.bytes, span->end, waits ? std::max(end, cell.sends->end) : end);
      }
    }
    for (const Span* span : {cell.sends, cell.ends}) {
      if (span == nullptr || span != first_sum_[stage]) continue;
      usages_[span->worker].add(bytes_[stage].parameters, span->end, kNeverFreed);
      break;
    }
  }

  double end_of(const HeldBytes& held, int micro_batch) const {
    if (held.stage == HeldBytes::kUntilForwardsEnd) return forwards_end_;
    if (held.stage == HeldBytes::kNeverFreed) return kNeverFreed;
    const CellSpans& cell = this->cell(held.stage, micro_batch);
    const Span* span = held.until == Kind::F                                 ? cell.forward
                       : held.until == Kind::R                               ? cell.recompute
                       : held.until == Kind::I || !bytes_[held.stage].splits ? cell.sends
                                                                             : cell.ends;
    return span == nullptr ? kNeverFreed : span->end;
  }

  CellSpans& cell(int stage, int micro_batch) { return cells_[stage * micro_batches_ + micro_batch]; }
  const CellSpans& cell(int stage, int micro_batch) const { return cells_[stage * micro_batches_ + micro_batch]; }

  const std::vector<CellBytes>& bytes_;
  const int micro_batches_;
  std::vector<Span*> spans_;
  std::vector<CellSpans> cells_;
  std::vector<const Span*> first_sum_;  // the first to add to the gradient sums, by stage
  std::vector<Usage> usages_;           // by worker
  double forwards_end_ = 0;
};

void check(const Span& span, std::size_t stages) {
  if (static_cast<std::size_t>(span.action.stage) < stages) return;
  throw std::invalid_argument(
      absl::StrFormat("the timeline has stage %d, but bytes are given for %d stages: give bytes for each stage",
                      span.action.stage, stages));
}

void check(const ActionBytes& bytes, int stages) {
  for (const HeldBytes& held : bytes.held) {
    if (held.stage >= HeldBytes::kNeverFreed && held.stage < stages) continue;
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
  int micro_batches = 0;
  int workers = 0;
  for (const Span& span : timeline.spans) {
    micro_batches = std::max(micro_batches, span.action.micro_batch + 1);
    workers = std::max(workers, span.worker + 1);
  }
  for (Span& span : timeline.spans) {
    steps.try_emplace(span.step, stages, micro_batches, workers).first->second.add(span);
  }
  for (auto& [number, step] : steps) step.account();
}

std::int64_t ActionBytes::kept() const {
  std::int64_t sum = 0;
  for (const HeldBytes& each : held) sum += each.bytes;
  return sum;
}

}  // namespace gpipe
