#include "balance/contender.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "balance/cut.h"
#include "gpipe/schedule/list_schedule.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

// A search ends when it has tried what is near so many plans in a row, and found no better one.
constexpr int kCutsInVain = 8;
constexpr int kPlansInVain = 16;

/// The least load of the busiest worker, whichever of these pieces each worker has. Some worker has k + 1 of the
/// k * workers + 1 largest pieces.
double least_load(std::vector<double> pieces, int workers) {
  std::ranges::sort(pieces, std::greater<>());
  double least = std::accumulate(pieces.begin(), pieces.end(), 0.0) / workers;
  for (std::ptrdiff_t k = 0; k * workers < std::ssize(pieces); ++k) {
    const auto first = pieces.begin();
    least = std::max(least, std::accumulate(first + k * (workers - 1), first + k * workers + 1, 0.0));
  }
  return least;
}

}  // namespace

bool is_better(const Plan& a, const Plan& b) {
  return std::pair(a.missing, a.seconds) < std::pair(b.missing, b.seconds);
}

Contender::Contender(Segments& segments, RunOptions run, const PlanOptions& options)
    : segments_(segments),
      run_(std::move(run)),
      placement_(run_.scheduling.placement),
      devices_(options, 1 + std::ranges::max(placement_), run_.network.replicas),
      given_(options),
      whole_(!options.balance.empty() || has_lists(run_.scheduling.schedule)),
      least_seconds_(find_least_seconds()) {
  if (!devices_.is_limited() || given_.checkpoint) return;
  const int stages = static_cast<int>(placement_.size());
  const Layout layout{stages, run_.chunks, placement_};
  const auto& name = run_.scheduling.schedule;
  const auto schedule =
      run_.scheduling.depth > 0 ? list_schedule(layout) : schedule_source(name, stages, 1, placement_).make(layout);
  const auto peaks = verify(layout, {}, with_recomputes(schedule, Checkpoint::kAlways, layout));
  for (int s = 0; s < stages; ++s) in_flight_.push_back({peaks.live[s], peaks.graphs[s]});
}

double Contender::find_least_seconds() const {
  const auto& cost = segments_.cost();
  const int layers = cost.layers();
  const int workers = 1 + std::ranges::max(placement_);
  // Before each layer, the least that all earlier ones take: in an F, in an F and the backward that passes gradients on
  // at once, and in all actions of a micro-batch. A layer can be recomputed or not, and split or not.
  std::vector<double> forward = {0};
  std::vector<double> passes = {0};
  std::vector<double> all = {0};
  for (int i = 0; i < layers; ++i) {
    const auto of = cost.sum(i, i + 1);
    const double backward = std::min(of.backward, of.input_gradient);
    forward.push_back(forward.back() + std::min(of.forward, of.stored));
    passes.push_back(passes.back() + backward);
    all.push_back(all.back() + of.forward + std::min(of.backward, of.input_gradient + of.weight_gradient));
  }
  std::vector<double> pieces;  // between places for a cut
  for (int i = 0, first = 0; i < layers; ++i) {
    if (cost.can_cut_before(i + 1)) pieces.push_back(all[i + 1] - all[std::exchange(first, i + 1)]);
  }
  double low = run_.chunks * least_load(std::move(pieces), workers);
  if (std::ssize(placement_) != workers) return low;
  const auto suffices = [&](double seconds) {
    int end = 0;
    for (int worker = 0; worker < workers; ++worker) {
      const int first = end;
      const auto fits = [&](int to) {
        const double chain = forward[to] - forward[first] + passes[to] - passes[first];
        return forward[first] + run_.chunks * (all[to] - all[first]) <= seconds &&
               forward[first] + run_.chunks * chain + passes[first] <= seconds;
      };
      while (end < layers && fits(end + 1)) ++end;
    }
    return end == layers;
  };
  for (double high = run_.chunks * all.back(); high - low > 1e-3 * low;) {
    const double middle = (low + high) / 2;
    (suffices(middle) ? high : low) = middle;
  }
  return low;
}

void Contender::start(std::int64_t& actions) {
  if (!given_.balance.empty()) return solve(segments_.cost().ends(given_.balance), actions);
  const int stages = static_cast<int>(placement_.size());
  const auto seconds = [&](int first, int end) { return segments_.cost().seconds(first, end, run_); };
  solve(stage_ends(cut_at(segments_.cost(), stages, [&](int, int a, int b) { return seconds(a, b); })), actions);
  const auto& network = run_.network;
  if (network.inside.bandwidth > 0 || network.between.bandwidth > 0) {
    solve(stage_ends(balance_by_load(segments_.cost(), run_)), actions);
  }
  if (in_flight_.empty() || (best_.fits() && best_.checkpoint == Checkpoints())) return;
  const auto bytes = [&](double limit, int stage, int first, int end) {
    const auto with = segments_.within(static_cast<std::int64_t>(limit), first, end, in_flight_[stage]);
    return std::pair(static_cast<double>(segments_.bytes(first, end, in_flight_[stage], with)), with.seconds);
  };
  const auto within_memory = [&](int stage, int first, int end) {
    const double limit = share(stage);
    const auto [needed, again] = bytes(limit, stage, first, end);
    const double cost = seconds(first, end) + again;
    return needed > limit ? 1e6 * cost * needed / limit : cost;
  };
  solve(stage_ends(cut_at(segments_.cost(), stages, within_memory)), actions);
  if (best_.fits()) return;
  const auto smallest = [&](int stage, int a, int b) { return bytes(0, stage, a, b).first / share(stage); };
  solve(stage_ends(cut_at(segments_.cost(), stages, smallest)), actions);
}

void Contender::refine(std::int64_t& actions) {
  if (given_.balance.empty()) {
    search(cuts_, kCutsInVain, [&](const std::vector<int>& ends) {
      for (const auto& moved : segments_.cost().near(balance_of(ends))) {
        const auto other = stage_ends(moved);
        if (actions > 0 && !cuts_.contains(other)) solve(other, actions);
      }
    });
  }
  const bool is_tight = std::ranges::any_of(tried_, [](const auto& each) { return !each.second.plan.fits(); });
  deepen(actions);
  if (is_tight && !in_flight_.empty()) {  // else nothing needs a recompute
    search(tried_, kPlansInVain, [&](const Parts& parts) {
      for (const auto& other : near(parts)) {
        if (actions > 0) offer(other, actions);
      }
    });
  }
  relax(actions);
}

template <typename Key, typename TryNear>
void Contender::search(std::map<Key, Tried>& tried, int most_in_vain, const TryNear& try_near) {
  const auto lacks = [&](const Plan& plan) {
    double sum = 0;
    if (plan.fits()) return sum;
    const auto bytes = devices_.sum(plan.bytes);
    for (int d = 0; d < devices_.count(); ++d) {
      sum += std::max(0.0, static_cast<double>(bytes[d]) / static_cast<double>(devices_.memory(d)) - 1);
    }
    return sum;
  };
  for (int in_vain = 0; in_vain < most_in_vain; ++in_vain) {
    // Every other time, a fast plan that lacks little memory may come first: two changes can make it fit.
    const auto order = [&](const auto& each) {
      const auto& [plan, is_left] = each.second;
      const double lacking = lacks(plan);
      return std::tuple(is_left, in_vain % 2 == 0 ? lacking : 0, plan.seconds * (1 + lacking));
    };
    const auto next = std::ranges::min_element(tried, {}, order);
    if (std::exchange(next->second.is_left, true)) return;
    const auto before = std::pair(best_.missing, best_.seconds);
    try_near(next->first);
    if (std::pair(best_.missing, best_.seconds) < before) in_vain = -1;
  }
}

void Contender::deepen(std::int64_t& actions) {
  if (run_.scheduling.depth == 0) return;
  const int workers = 1 + std::ranges::max(placement_);
  const int stages = (static_cast<int>(placement_.size()) + workers - 1) / workers;  // of a worker
  const double before = run_.scheduling.depth;
  double best = before;
  for (int cells = stages; cells < 2 * workers * stages && actions > 0; ++cells) {
    run_.scheduling.depth = 1.0 * cells / stages;
    auto plan = predicted(best_parts_, actions);
    if (!is_better(plan, best_)) continue;
    best_ = std::move(plan);
    best = run_.scheduling.depth;
  }
  run_.scheduling.depth = best;
  if (best != before) tried_ = {{best_parts_, {best_}}};  // the others had another depth
}

void Contender::relax(std::int64_t& actions) {
  if (!best_.fits() || in_flight_.empty()) return;
  for (std::size_t s = 0; s < best_parts_.size() && actions > 0; ++s) {
    if (best_parts_[s].mode != Checkpoint::kAlways) continue;
    int low = -1;                                                                                // does not fit
    int high = std::min(run_.chunks, std::ranges::max(in_flight_, {}, &InFlight::cells).cells);  // fits
    while (high - low > 1 && actions > 0) {
      const int count = (low + high) / 2;
      auto fewer = best_parts_;
      fewer[s].mode = Checkpoint::in_flight(count);
      auto other = predicted(fewer, actions);
      const bool is_good = other.fits() && other.seconds <= best_.seconds;
      (is_good ? high : low) = count;
      if (!is_good) continue;
      best_ = std::move(other);
      best_parts_ = std::move(fewer);
    }
  }
}

std::vector<Contender::Parts> Contender::near(const Parts& parts) const {
  const auto& cost = segments_.cost();
  const auto stages_of = [](const Parts& of) {
    std::vector<int> stages;
    for (const auto& part : of) stages.push_back(part.stage);
    return std::unique(stages.begin(), stages.end()) - stages.begin();
  };
  std::vector<Parts> found;
  const auto add = [&](Parts other) {
    std::erase_if(other, [](const Part& part) { return part.layers == 0; });
    if (stages_of(other) == std::ssize(placement_)) found.push_back(std::move(other));
  };
  int first = 0;
  for (std::size_t s = 0; s < parts.size(); ++s) {
    const auto [stage, layers, mode] = parts[s];
    const int end = first + static_cast<int>(layers);
    auto flipped = parts;
    flipped[s].mode = mode == Checkpoint::kNever ? Checkpoint::kAlways : Checkpoint::kNever;
    add(std::move(flipped));
    for (const int step : {-1, 1}) {
      if (s + 1 == parts.size() || !given_.balance.empty()) continue;
      int moved = step;
      while (!cost.can_cut_before(end + moved)) moved += step;
      if (layers + moved < 0 || parts[s + 1].layers < moved) continue;
      auto other = parts;
      other[s].layers += moved;
      other[s + 1].layers -= moved;
      add(std::move(other));
    }
    if (!whole_ && s + 1 < parts.size() && parts[s + 1].stage == stage) {
      auto one = parts;
      one[s] = {stage, layers + one[s + 1].layers, Checkpoint::kAlways};
      one.erase(one.begin() + static_cast<std::ptrdiff_t>(s) + 1);
      add(std::move(one));
    }
    for (int cut = first + 1; cut < end && !whole_; ++cut) {
      if (!cost.can_cut_before(cut)) continue;
      for (const auto& [before, after] : {std::pair(Checkpoint::kAlways, Checkpoint::kAlways),
                                          {Checkpoint::kAlways, Checkpoint::kNever},
                                          {Checkpoint::kNever, Checkpoint::kAlways}}) {
        auto two = parts;
        two[s] = {stage, end - cut, after};
        two.insert(two.begin() + static_cast<std::ptrdiff_t>(s), {stage, cut - first, before});
        add(std::move(two));
      }
    }
    first = end;
  }
  return found;
}

double Contender::share(int stage) const {
  double all = 0;
  for (std::size_t s = 0; s < placement_.size(); ++s) {
    if (devices_.of(placement_[s]) == devices_.of(placement_[stage])) all += in_flight_[s].cells;
  }
  return static_cast<double>(devices_.memory(devices_.of(placement_[stage]))) * in_flight_[stage].cells / all;
}

Contender::Parts Contender::joined(const Parts& parts) const {
  Parts found;
  for (const auto& part : parts) {
    if (part.layers == 0) continue;
    const bool is_like_before = !found.empty() && found.back().stage == part.stage &&
                                found.back().mode == Checkpoint::kNever && part.mode == Checkpoint::kNever;
    if (is_like_before) {
      found.back().layers += part.layers;
    } else {
      found.push_back(part);
    }
  }
  return found;
}

Plan Contender::predicted(const Parts& parts, std::int64_t& actions) const {
  auto run = run_;
  run.scheduling.placement.clear();
  std::vector<std::int64_t> balance;
  std::vector<Checkpoint> modes;
  for (const auto& part : joined(parts)) {
    run.scheduling.placement.push_back(placement_[part.stage]);
    balance.push_back(part.layers);
    modes.push_back(part.mode);
  }
  const bool none = std::ranges::count(modes, Checkpoint::kNever) == std::ssize(modes);
  run.checkpoint = given_.checkpoint ? *given_.checkpoint : none ? Checkpoints() : Checkpoints(modes);
  actions -= std::ssize(balance) * run.chunks * 4;  // F, R, I, W
  auto prediction = predict(segments_.cost(), balance, run);
  auto schedule = run.scheduling.depth > 0 ? to_text(prediction.lists) : run.scheduling.schedule;
  Plan plan{std::move(prediction), run.chunks, run.checkpoint, std::move(schedule), run.network.replicas};
  if (devices_.is_limited()) plan.missing = std::max<std::int64_t>(0, devices_.fullest(plan.bytes).second);
  return plan;
}

const Plan& Contender::offer(const Parts& parts, std::int64_t& actions) {
  const auto [it, is_new] = tried_.try_emplace(joined(parts));
  auto& plan = it->second.plan;
  if (!is_new) return plan;
  plan = predicted(parts, actions);
  if (best_parts_.empty() || is_better(plan, best_)) {
    best_ = plan;
    best_parts_ = it->first;
  }
  return plan;
}

const Plan& Contender::priced(const std::vector<int>& ends, const std::vector<int>& prices, std::int64_t& actions) {
  Parts parts;
  for (int stage = 0, first = 0; const int end : ends) {
    const int price = prices[devices_.of(placement_[stage])];
    const auto with = price == 0 ? Recomputation()
                      : whole_   ? segments_.whole(first, end)
                                 : segments_.at(price, first, end, in_flight_[stage]);
    for (const auto& segment : segments_.segments(first, end, with)) {
      parts.push_back({stage, segment.first - first, Checkpoint::kNever});
      parts.push_back({stage, segment.end - segment.first, Checkpoint::kAlways});
      first = segment.end;
    }
    parts.push_back({stage, end - first, Checkpoint::kNever});
    first = end;
    ++stage;
  }
  return offer(parts, actions);
}

void Contender::solve(const std::vector<int>& ends, std::int64_t& actions) {
  auto& best = cuts_[ends].plan;
  std::vector<int> low(devices_.count());  // the price that is known to be too low
  best = priced(ends, low, actions);
  if (best.fits() || given_.checkpoint) return;
  auto high = low;
  const auto raise = [&](const Plan& of) {
    bool raised = false;
    const auto bytes = devices_.sum(of.bytes);
    for (int d = 0; d < devices_.count(); ++d) {
      if (bytes[d] <= devices_.memory(d) || high[d] > 0) continue;
      high[d] = whole_ ? 1 : Segments::kPrices;
      raised = true;
    }
    return raised;
  };
  while (!best.fits() && raise(best)) best = priced(ends, high, actions);
  while (best.fits()) {
    std::vector<int> middle = high;
    for (int d = 0; d < devices_.count(); ++d) middle[d] = high[d] - low[d] > 1 ? (low[d] + high[d]) / 2 : high[d];
    if (middle == high) return;
    const auto& other = priced(ends, middle, actions);
    if (other.fits()) {
      high = middle;
      if (other.seconds <= best.seconds) best = other;
      continue;
    }
    const auto bytes = devices_.sum(other.bytes);
    for (int d = 0; d < devices_.count(); ++d) {
      (bytes[d] > devices_.memory(d) ? low : high)[d] = middle[d];
    }
  }
}

}  // namespace gpipe
