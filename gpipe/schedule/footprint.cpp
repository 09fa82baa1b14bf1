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

constexpr double kForEver = std::numeric_limits<double>::infinity();

/// The spans of one cell.
struct CellSpans {
  Span* forward = nullptr;
  Span* recompute = nullptr;
  Span* sends = nullptr;  ///< B or I
  Span* ends = nullptr;   ///< B or W
};

double end_of(const Span* span) { return span == nullptr ? kForEver : span->end; }

/// What one worker has in use over time.
class Usage {
 public:
  void add(std::int64_t bytes, double from, double to) {
    changes_[from] += bytes;
    changes_[to] -= bytes;
  }

  /// Call once, after the last add() and before the first at().
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
    const Span*& first = first_end_[stage];
    if (cell.ends == &span && (first == nullptr || span.end < first->end)) first = &span;
  }

  void account(const std::vector<Edge>& edges) {
    for (const auto& [key, cell] : cells_) hold(key.first, key.second, cell, edges);
    for (auto& [worker, usage] : usages_) usage.sum_up();
    for (Span* span : spans_) {
      const Usage& usage = usages_[span->worker];
      const auto before = usage.at(span->start);
      // What is handed over at the end of the last forward is still there when that has run.
      const auto after = span->action.kind == Kind::F ? before + of(*span).kept : usage.at(span->end);
      span->bytes = {before, std::max(before + of(*span).extra, after), after};
    }
  }

 private:
  const ActionBytes& of(const Span& span) const {
    const auto [kind, stage, micro_batch] = span.action;
    const CellBytes& bytes = bytes_[stage];
    if (kind == Kind::R) return bytes.recompute;
    if (kind != Kind::F) return bytes.backward;
    return cells_.at({stage, micro_batch}).recompute == nullptr ? bytes.forward : bytes.stored;
  }

  void hold(int stage, int micro_batch, const CellSpans& cell, const std::vector<Edge>& edges) {
    const CellBytes& bytes = bytes_[stage];
    if (cell.forward != nullptr) {
      Usage& usage = usages_[cell.forward->worker];
      usage.add(of(*cell.forward).kept - bytes.handed_over, cell.forward->end, end_of(cell.ends));
      usage.add(bytes.handed_over, cell.forward->end, forwards_end_);
    }
    if (cell.recompute != nullptr) {
      usages_[cell.recompute->worker].add(bytes.recompute.kept, cell.recompute->end, end_of(cell.ends));
    }
    if (cell.sends != nullptr) {
      usages_[cell.sends->worker].add(bytes.backward.kept, cell.sends->end, used_by(stage, micro_batch, edges));
    }
    if (cell.ends != nullptr && cell.ends == first_end_[stage]) {
      usages_[cell.ends->worker].add(bytes.parameters, cell.ends->end, kForEver);
    }
  }

  /// When every stage that a cell's gradients may be for has used them; never, when they are for the caller.
  double used_by(int stage, int micro_batch, const std::vector<Edge>& edges) const {
    double last = -kForEver;
    for (const Edge& edge : edges) {
      if (edge.to != stage) continue;
      const auto receiver = cells_.find({edge.from, micro_batch});
      last = std::max(last, receiver == cells_.end() ? kForEver : end_of(receiver->second.sends));
    }
    return last == -kForEver ? kForEver : last;
  }

  const std::vector<CellBytes>& bytes_;
  std::vector<Span*> spans_;
  std::map<std::pair<int, int>, CellSpans> cells_;  // by stage and micro-batch
  std::map<int, const Span*> first_end_;            // of a cell, by stage
  std::map<int, Usage> usages_;                     // by worker
  double forwards_end_ = 0;
};

void check(const Span& span, std::size_t stages) {
  if (static_cast<std::size_t>(span.action.stage) < stages) return;
  throw std::invalid_argument(absl::StrFormat(
      "the timeline has stage %d, but bytes are given of %d stages: give one each", span.action.stage, stages));
}

void most(std::int64_t& value, std::int64_t other) { value = std::max(value, other); }

void see(ActionBytes& bytes, const Footprint& seen) {
  most(bytes.extra, seen.peak - seen.before);
  most(bytes.kept, seen.after - seen.before);
}

}  // namespace

void account(Timeline& timeline, const std::vector<CellBytes>& stages) {
  std::map<int, Step> steps;
  for (const Span& span : timeline.spans) check(span, stages.size());
  for (Span& span : timeline.spans) steps.try_emplace(span.step, stages).first->second.add(span);
  for (auto& [number, step] : steps) step.account(timeline.edges);
}

std::vector<CellBytes> cell_bytes(const Timeline& never, const Timeline& always,
                                  const std::vector<std::int64_t>& parameters) {
  const int last = static_cast<int>(parameters.size()) - 1;
  std::vector<CellBytes> stages(parameters.size());
  for (const Timeline* timeline : {&never, &always}) {
    std::map<std::pair<int, int>, std::int64_t> after_forward;  // by step and stage
    for (const Span& span : timeline->spans) {
      check(span, stages.size());
      const auto& [worker, action, start, end, step, seen] = span;
      CellBytes& bytes = stages[action.stage];
      bytes.parameters = parameters[action.stage];
      if (action.kind == Kind::F) {
        see(timeline == &never ? bytes.forward : bytes.stored, seen);
        after_forward[{step, action.stage}] = seen.after;
        continue;
      }
      if (action.kind == Kind::R) {
        see(bytes.recompute, seen);
      } else {
        most(bytes.backward.extra, seen.peak - seen.before);
        most(bytes.backward.kept, seen.after - bytes.parameters);
      }
      const auto forward = after_forward.extract({step, action.stage});
      if (forward && action.stage == last) most(bytes.handed_over, forward.mapped() - seen.before);
    }
  }
  // A recompute builds the graph of a forward. What others free meanwhile would hide some of it.
  for (CellBytes& bytes : stages) {
    most(bytes.recompute.extra, bytes.forward.extra);
    most(bytes.recompute.kept, bytes.forward.kept);
  }
  return stages;
}

}  // namespace gpipe
