#include "gpipe/simulator.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "gpipe/base/checks.h"
#include "gpipe/schedule/verifier.h"

namespace gpipe {
namespace {

using absl::StrFormat;

void check_size(const char* what, std::size_t size, std::size_t wanted, const char* of, bool optional) {
  if (size == wanted || (optional && size == 0)) return;
  refuse_argument("simulate: got ", what, " for ", size, " ", of, "s, but the program has ", wanted, " ", of,
                  "s: give one per ", of, optional ? ", or none" : "");
}

void check_duration(double seconds, absl::FunctionRef<std::string()> what) {
  if (std::isfinite(seconds) && seconds >= 0) return;
  refuse_argument("simulate: ", what(), " costs ", seconds, " s: give a finite time of at least 0");
}

void check(const Program& program, const Costs& costs) {
  const auto stages = static_cast<std::size_t>(program.layout().stages);
  const auto& edges = program.edges();
  check_size("costs", costs.actions.size(), stages, "stage", /*optional=*/false);
  check_size("costs", costs.edges.size(), edges.size(), "edge", /*optional=*/false);
  check_size("times of sending", costs.sending.size(), edges.size(), "edge", /*optional=*/true);
  check_size("costs of stored forwards", costs.stored.size(), stages, "stage", /*optional=*/true);
  check_size("bytes", costs.bytes.size(), stages, "stage", /*optional=*/true);
  for (std::size_t s = 0; s < stages; ++s) {
    for (const Kind kind : {Kind::F, Kind::R, Kind::B, Kind::I, Kind::W}) {
      check_duration(costs.actions[s][static_cast<std::size_t>(kind)],
                     [&] { return StrFormat("action %c of stage %d", to_char(kind), s); });
    }
    if (!costs.stored.empty()) check_duration(costs.stored[s], [&] { return StrFormat("a stored F of stage %d", s); });
  }
  for (std::size_t e = 0; e < edges.size(); ++e) {
    const auto edge = [&] { return StrFormat("edge %d ('%s')", e, edges[e].name); };
    check_duration(costs.edges[e], edge);
    if (costs.sending.empty() || (costs.sending[e] >= 0 && costs.sending[e] <= costs.edges[e])) continue;
    refuse_argument("simulate: ", edge(), " sends for ", costs.sending[e], " s: give a time from 0 to its cost, ",
                    costs.edges[e], " s");
  }
}

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
  Step(const std::vector<CellBytes>& bytes, const Timeline& timeline)
      : bytes_(bytes),
        timeline_(timeline),
        wiring_(static_cast<int>(bytes.size()), timeline.edges),
        cells_(bytes.size()),
        first_sums_(bytes.size()) {}

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
    const auto keep_first = [&](const Span*& first) {
      if (first == nullptr || span.end < first->end) first = &span;
    };
    if (&span == cell.sends) keep_first(first_sums_[stage].early);
    if (&span == cell.ends) keep_first(first_sums_[stage].late);
  }

  void account() {
    find_puts();
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
  /// The gradient sums that the action allocates.
  std::int64_t sums_of(const Span& span) const {
    const auto& [early, late] = first_sums_[span.action.stage];
    const CellBytes& bytes = bytes_[span.action.stage];
    return (early == &span ? bytes.early_parameters : 0) +
           (late == &span ? bytes.parameters - bytes.early_parameters : 0);
  }

  std::int64_t extra_of(const Span& span) const {
    const CellBytes& bytes = bytes_[span.action.stage];
    const auto& [early, late] = first_sums_[span.action.stage];
    const Kind kind = span.action.kind;
    if (kind == Kind::W && !bytes.splits) return 0;
    const auto extra = kind == Kind::W ? bytes.weight_gradient_extra : of(span).extra;
    if (early != &span && late != &span) return extra;
    return std::max(extra, kind == Kind::I   ? bytes.first_input_gradient_extra
                           : kind == Kind::W ? bytes.first_weight_gradient_extra
                                             : bytes.first_backward_extra);
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

  /// A worker puts something for another, which takes it, or takes what is put later, if that is earlier.
  struct Put {
    double start = 0;  ///< of the action that puts
    double taken = 0;  ///< the start of the action that takes
  };

  void find_puts() {
    std::ranges::stable_sort(spans_, {}, &Span::start);
    for (const Span* span : spans_) {
      auto& last = last_ends_[span->worker];
      last = std::max(last, span->end);
      for (const int e : wiring_.puts(span->action)) {
        const bool is_forward = span->action.kind == Kind::F;
        const auto& cells = cells_[is_forward ? timeline_.edges[e].to : timeline_.edges[e].from];
        if (static_cast<std::size_t>(span->action.micro_batch) >= cells.size()) continue;
        const CellSpans& taker = cells[span->action.micro_batch];
        const Span* taking = is_forward ? taker.forward : taker.sends;
        if (taking == nullptr || taking->worker == span->worker) continue;
        puts_[{span->worker, taking->worker}].push_back({span->start, taking->start});
      }
    }
    for (auto& [workers, puts] : puts_) {
      for (auto put = puts.rbegin() + 1; put != puts.rend(); ++put) put->taken = std::min(put->taken, (put - 1)->taken);
    }
  }

  /// When the memory that `span` frees is surely free for a worker: another worker may be slower than it seems, until the
  /// worker has taken what the other puts afterwards. After its last action, a worker needs no memory.
  double free_for(int worker, const Span& span) {
    if (span.worker == worker) return span.end;
    const auto& puts = puts_[{span.worker, worker}];
    const auto next = std::ranges::lower_bound(puts, span.start, {}, &Put::start);
    return std::max(span.end, next == puts.end() ? last_ends_[worker] : next->taken);
  }

  void hold(const Span& span) {
    const auto [kind, stage, micro_batch] = span.action;
    Usage& usage = usages_[span.worker];
    const Span* sends = cells_[stage][micro_batch].sends;
    for (const HeldBytes& held : of(span).held) {
      const double end = end_of(held, span);
      usage.add(held.bytes, span.end, held.until_own_backward && sends != nullptr ? std::max(end, sends->end) : end);
    }
    usage.add(sums_of(span), span.end, kNeverFreed);
  }

  double end_of(const HeldBytes& held, const Span& holder) {
    if (held.until == Until::kForwardsEnd) return forwards_end_;
    if (held.until == Until::kNever) return kNeverFreed;
    const auto& cells = cells_[held.stage];
    const auto micro_batch = static_cast<std::size_t>(holder.action.micro_batch);
    if (micro_batch >= cells.size()) return kNeverFreed;
    const auto& [forward, recompute, sends, ends] = cells[micro_batch];
    const bool is_last = held.until == Until::kLast && bytes_[held.stage].splits;
    const Span* span = held.until == Until::kForward     ? forward
                       : held.until == Until::kRecompute ? (recompute != nullptr ? recompute : forward)
                       : is_last                         ? ends
                                                         : sends;
    return span == nullptr ? kNeverFreed : free_for(holder.worker, *span);
  }

  const std::vector<CellBytes>& bytes_;
  const Timeline& timeline_;
  const Wiring wiring_;
  std::vector<Span*> spans_;
  std::map<std::pair<int, int>, std::vector<Put>> puts_;  // by worker that puts and worker that takes
  std::map<int, double> last_ends_;                       // by worker
  std::vector<std::vector<CellSpans>> cells_;             // by stage and micro-batch
  /// The first actions that allocate gradient sums.
  struct FirstSums {
    const Span* early = nullptr;  // B or I
    const Span* late = nullptr;   // B or W
  };
  std::vector<FirstSums> first_sums_;  // by stage
  std::map<int, Usage> usages_;        // by worker
  double forwards_end_ = 0;
};

}  // namespace

void account(Timeline& timeline, const std::vector<CellBytes>& stages) {
  for (const Edge& edge : timeline.edges) {
    if (std::min(edge.from, edge.to) >= 0 && std::max(edge.from, edge.to) < std::ssize(stages)) continue;
    refuse_argument("the timeline has an edge from stage ", edge.from, " to ", edge.to, ", but bytes are given for ",
                    stages.size(), " stages: give bytes for each stage");
  }
  for (const CellBytes& it : stages) {
    for (const auto* action : {&it.forward, &it.stored, &it.recompute, &it.backward, &it.input_gradient}) {
      for (const HeldBytes& held : action->held) {
        if (held.stage < 0 || held.stage >= std::ssize(stages)) {
          refuse_argument("bytes are held until an action of stage ", held.stage, ", but there are ", stages.size(),
                          " stages");
        }
      }
    }
  }
  std::map<int, Step> steps;
  for (Span& span : timeline.spans) {
    if (span.action.stage < 0 || span.action.stage >= std::ssize(stages)) {
      refuse_argument("the timeline has stage ", span.action.stage, ", but bytes are given for ", stages.size(),
                      " stages: give bytes for each stage");
    }
    steps.try_emplace(span.step, stages, timeline).first->second.add(span);
  }
  for (auto& [number, step] : steps) step.account();
}

std::int64_t ActionBytes::kept() const {
  std::int64_t sum = 0;
  for (const HeldBytes& each : held) sum += each.bytes;
  return sum;
}

Simulation simulate(const Program& program, const Costs& costs) {
  check(program, costs);
  const auto seconds = [&](const Action& action) {
    if (action.kind == Kind::F && !costs.stored.empty() && program.recomputes(action.stage, action.micro_batch)) {
      return costs.stored[action.stage];
    }
    return costs.actions[action.stage][static_cast<std::size_t>(action.kind)];
  };
  const Replay result = replay(program.layout(), program.edges(), program.wiring(), program.schedule(), seconds,
                               costs.edges, costs.sending);
  Simulation simulation;
  simulation.timeline.workers = program.workers();
  simulation.timeline.edges = program.edges();
  for (const auto& spans : result.spans) {
    simulation.timeline.spans.insert(simulation.timeline.spans.end(), spans.begin(), spans.end());
  }
  if (!costs.bytes.empty()) account(simulation.timeline, costs.bytes);
  simulation.makespan = simulation.timeline.makespan();
  simulation.bubble = simulation.timeline.bubble();
  for (const auto& list : program.schedule()) {
    simulation.peak_cells.push_back(program.has_backward() ? peak_cells(list) : 1);
  }
  return simulation;
}

}  // namespace gpipe
