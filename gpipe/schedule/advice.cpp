#include "gpipe/schedule/advice.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/clock.h"
#include "gpipe/partition.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

constexpr double kLossOfSmall = 1.1;  // half a micro-batch may take up to 10 % more than half the time

template <typename T>
std::string to_list(const std::vector<T>& items) {
  return absl::StrCat("[", absl::StrJoin(items, ", "), "]");
}

bool has(const Schedule& schedule, Kind kind) {
  return std::ranges::any_of(schedule,
                             [&](const auto& list) { return std::ranges::count(list, kind, &Action::kind) > 0; });
}

Schedule without_recomputes(Schedule schedule) {
  for (auto& list : schedule) std::erase_if(list, [](const Action& action) { return action.kind == Kind::R; });
  return schedule;
}

/// A layer's share of its stage. The loss belongs to the last layer.
struct Share {
  int stage = 0;
  double share = 0;
};

/// The layers of a timeline, and how to cut them so that the slowest stage is fastest.
struct Cut {
  std::vector<Share> layers;          // empty if unknown
  std::vector<std::int64_t> balance;  // empty if no other is better
};

Cut find_cut(const Timeline& timeline, int workers) {
  if (timeline.layers.empty()) return {};
  const int stages = timeline.layers.back().stage + 1;
  const auto has_layers = [&](const Span& span) { return span.action.stage < stages; };
  if (timeline.layers.front().stage > 0 || !std::ranges::all_of(timeline.spans, has_layers)) return {};
  std::vector<double> work(stages);
  for (const auto& span : timeline.spans) {
    if (span.worker < workers && span.action.stage < stages) work[span.action.stage] += span.end - span.start;
  }
  std::vector<double> of_layers(stages);
  for (const auto& [stage, seconds] : timeline.layers) of_layers[stage] += seconds;
  if (std::ranges::min(of_layers) <= 0) return {};
  Cut cut;
  std::vector<double> times;
  std::vector<std::int64_t> balance(stages);
  for (const auto& [stage, seconds] : timeline.layers) {
    cut.layers.push_back({stage, seconds / of_layers[stage]});
    times.push_back(work[stage] * cut.layers.back().share);
    ++balance[stage];
  }
  cut.layers.rbegin()[1].share += cut.layers.back().share;
  times.rbegin()[1] += times.back();
  cut.layers.pop_back();
  times.pop_back();
  if (--balance.back() == 0) return {};
  std::vector<double> sums(times.size() + 1);
  std::partial_sum(times.begin(), times.end(), sums.begin() + 1);
  cut.balance = best_partition(static_cast<int>(times.size()), stages,
                               [&](int, int first, int end) { return sums[end] - sums[first]; });
  if (cut.balance == balance) cut.balance.clear();
  return cut;
}

/// One step, and what changes would save.
class Neighbours {
 public:
  /// `seconds`: from the first action to the last.
  Neighbours(std::vector<Span> spans, const std::vector<Edge>& edges, std::vector<double> transfers, double seconds)
      : spans_(std::move(spans)),
        program_(program_of(spans_, edges)),
        layout_(program_.layout()),
        costs_(costs_of(spans_, layout_.stages, median)) {
    costs_.edges = std::move(transfers);
    simulated_ = simulate(program_, costs_).makespan;
    if (simulated_ > 0) jitter_ = seconds / simulated_;
    for (int s = 0; s < layout_.stages; ++s) {
      int recomputed = 0;
      for (int m = 0; m < layout_.micro_batches; ++m) recomputed += program_.recomputes(s, m) ? 1 : 0;
      modes_.push_back(recomputed == 0                       ? Checkpoint::kNever
                       : recomputed == layout_.micro_batches ? Checkpoint::kAlways
                                                             : Checkpoint::kExceptLast);
      is_known_ &= recomputed == modes_.back().recomputed(layout_.micro_batches);
    }
  }

  std::map<std::string, double> gains(const Cut& cut) && {
    if (!program_.has_backward()) return {};
    if (is_known_) offer_schedules();
    offer_checkpoints();
    if (is_known_ && layout_.micro_batches % 2 == 0) offer_chunks(layout_.micro_batches / 2);
    if (is_known_) offer_chunks(layout_.micro_batches * 2);
    offer_cut(cut);
    auto costs = costs_of(spans_, layout_.stages, median, /*queues=*/false);
    costs.edges = costs_.edges;
    offer("a core for each worker", layout_, program_.schedule(), costs);
    return std::move(gains_);
  }

 private:
  void offer(const std::string& change, const Layout& layout, Schedule lists, Costs costs) {
    for (std::size_t e = 0; e < costs.edges.size(); ++e) {
      const auto& [from, to, name] = program_.edges()[e];
      if (layout.placement[from] == layout.placement[to]) costs.edges[e] = 0;
    }
    const auto other = Program::make(layout, program_.edges(), std::move(lists));
    gains_[change] = jitter_ * (simulated_ - simulate(other, costs).makespan);
  }

  void offer_schedules() {
    auto layouts = std::vector{layout_};
    if (layout_.stages == 2 * layout_.workers()) {
      for (auto placement : {looped_placement(layout_.workers(), layout_.stages), v_placement(layout_.stages)}) {
        if (placement != layout_.placement) layouts.push_back({layout_.stages, layout_.micro_batches, placement});
      }
    }
    const bool is_split = has(program_.schedule(), Kind::I);
    for (const auto& layout : layouts) {
      for (const auto& rule : schedule_rules()) {
        if (!rule.misfit(layout).empty() || !too_few_stages(rule.name, layout.placement).empty()) continue;
        auto lists = make_schedule(rule.name, layout, modes_);
        if (lists == program_.schedule()) rule_ = rule.name;
        if (has(lists, Kind::I) && !is_split) continue;  // how long I and W take is not known
        auto change = "schedule='" + std::string(rule.name) + "'";
        if (layout.placement != layout_.placement) absl::StrAppend(&change, ", placement=", to_list(layout.placement));
        offer(change, layout, std::move(lists), costs_);
      }
    }
  }

  void offer_checkpoints() {
    const auto never = without_recomputes(program_.schedule());
    if (never == program_.schedule()) {
      return offer("checkpoint='always'", layout_, with_recomputes(never, Checkpoint::kAlways, layout_), costs_);
    }
    offer("checkpoint='never'", layout_, never, costs_);
    for (int s = 0; s < layout_.stages && is_known_ && layout_.stages > 1; ++s) {
      if (modes_[s] == Checkpoint::kNever) continue;
      auto modes = modes_;
      modes[s] = Checkpoint::kNever;
      std::vector<std::string> names;
      for (const auto mode : modes) names.push_back(absl::StrCat("'", to_string(mode), "'"));
      offer("checkpoint=" + to_list(names), layout_, with_recomputes(never, modes, layout_), costs_);
    }
  }

  void offer_chunks(int chunks) {
    const Layout layout{layout_.stages, chunks, layout_.placement};
    if (rule_.empty() || chunks > kMostCells / layout_.stages) return;
    if (!schedule_rule(rule_).misfit(layout).empty()) return;
    const auto change = absl::StrCat("chunks=", chunks);
    const auto offer_times = [&](double factor) {
      auto costs = costs_;
      factor *= static_cast<double>(layout_.micro_batches) / chunks;
      for (auto& times : costs.actions) {
        for (auto& seconds : times) seconds *= factor;
      }
      for (auto& seconds : costs.stored) seconds *= factor;
      for (auto& seconds : costs.edges) seconds *= factor;
      offer(change, layout, make_schedule(rule_, layout, modes_), costs);
      return gains_.at(change) > 0;
    };
    if (chunks > layout_.micro_batches && !offer_times(kLossOfSmall)) {
      gains_.erase(change);
    } else {
      offer_times(1);
    }
  }

  void offer_cut(const Cut& cut) {
    const bool is_uniform = std::ranges::count(modes_, modes_.front()) == layout_.stages;
    if (std::ssize(cut.balance) != layout_.stages || !is_uniform) return;
    auto costs = costs_;
    auto layer = cut.layers.begin();
    for (int s = 0; s < layout_.stages; ++s) {
      costs.actions[s] = {};
      costs.stored[s] = 0;
      for (auto left = cut.balance[s]; left > 0; --left, ++layer) {
        const auto& [stage, share] = *layer;
        for (std::size_t kind = 0; kind < 5; ++kind) costs.actions[s][kind] += share * costs_.actions[stage][kind];
        costs.stored[s] += share * costs_.stored[stage];
      }
    }
    offer("balance=" + to_list(cut.balance), layout_, program_.schedule(), costs);
  }

  const std::vector<Span> spans_;
  const Program program_;
  const Layout layout_;
  Costs costs_;
  double simulated_ = 0;
  double jitter_ = 1;  // by which the step took longer than the simulation, as its neighbours would
  std::vector<Checkpoint> modes_;
  bool is_known_ = true;   // whether the modes are; a number is not
  std::string_view rule_;  // of the step's schedule
  std::map<std::string, double> gains_;
};

}  // namespace

Costs costs_of(const std::vector<Span>& spans, int stages, absl::FunctionRef<double(std::vector<double>)> typical,
               bool queues) {
  constexpr double kUnknown = -1;
  std::set<std::pair<int, int>> recomputed;  // stage and micro-batch
  for (const auto& span : spans) {
    if (span.action.kind == Kind::R) recomputed.emplace(span.action.stage, span.action.micro_batch);
  }
  std::map<std::tuple<int, Kind, bool>, std::vector<double>> times;
  for (const auto& span : spans) {
    const auto [kind, stage, micro_batch] = span.action;
    const bool stored = kind == Kind::F && recomputed.contains({stage, micro_batch});
    times[{stage, kind, stored}].push_back(span.lead + span.end - span.start - (queues ? 0 : span.queued));
  }
  const auto seconds_of = [&](int stage, Kind kind, bool stored = false) {
    const auto found = times.find({stage, kind, stored});
    return found == times.end() ? kUnknown : typical(found->second);
  };
  Costs costs;
  for (int s = 0; s < stages; ++s) {
    auto& [forward, recompute, backward, input, weight] = costs.actions.emplace_back();
    auto& stored = costs.stored.emplace_back(seconds_of(s, Kind::F, true));
    forward = seconds_of(s, Kind::F);
    recompute = seconds_of(s, Kind::R);
    backward = seconds_of(s, Kind::B);
    input = seconds_of(s, Kind::I);
    weight = seconds_of(s, Kind::W);
    if (forward == kUnknown) forward = std::max(stored, recompute);  // as an R, an F then makes a graph
    if (stored == kUnknown) stored = forward;
    if (recompute == kUnknown) recompute = forward;
    if (input == kUnknown) std::tie(input, weight) = std::pair(backward, 0.0);  // no backward was split
    if (backward == kUnknown) backward = input + weight;
  }
  return costs;
}

Program program_of(const std::vector<Span>& spans, std::vector<Edge> edges) {
  Layout layout{0, 0, {}};
  Schedule schedule;
  for (const auto& span : spans) {
    const auto [kind, stage, micro_batch] = span.action;
    layout.stages = std::max(layout.stages, stage + 1);
    layout.micro_batches = std::max(layout.micro_batches, micro_batch + 1);
    layout.placement.resize(layout.stages);
    layout.placement[stage] = span.worker;
    schedule.resize(std::max(schedule.size(), static_cast<std::size_t>(span.worker) + 1));
    schedule[span.worker].push_back(span.action);
  }
  return Program::make(std::move(layout), std::move(edges), std::move(schedule));
}

std::vector<std::map<std::string, double>> gains(const Timeline& timeline, const std::vector<StepBlame>& steps) {
  const int workers = timeline.workers / timeline.replicas;
  const auto cut = find_cut(timeline, workers);
  std::vector<std::map<std::string, double>> gained;
  for (const auto& step : steps) {
    std::vector<Span> spans;
    std::ranges::copy_if(timeline.spans, std::back_inserter(spans),
                         [&](const Span& span) { return span.step == step.step && span.worker < workers; });
    std::ranges::stable_sort(spans, {}, &Span::start);
    gained.push_back(Neighbours(std::move(spans), timeline.edges, step.transfers, step.replayed).gains(cut));
  }
  return gained;
}

std::vector<Advice> advice(const std::vector<std::map<std::string, double>>& gained, double seconds) {
  std::map<std::string, std::vector<double>> saved;
  for (const auto& of_step : gained) {
    for (const auto& [change, gain] : of_step) saved[change].push_back(gain);
  }
  std::vector<Advice> found;
  for (auto& [change, gains] : saved) {
    gains.resize(gained.size());  // it saves nothing in steps of another kind
    std::ranges::sort(gains);
    const auto tenth = gains.size() / 10;
    const Advice each{change, gains[gains.size() / 2], gains[tenth], gains[gains.size() - 1 - tenth]};
    if (each.low >= 0.01 * seconds) found.push_back(each);
  }
  std::ranges::stable_sort(found, std::greater(), &Advice::seconds);
  return found;
}

}  // namespace gpipe
