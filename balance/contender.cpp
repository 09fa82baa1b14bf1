#include "balance/contender.h"

#include <algorithm>

#include "balance/cut.h"
#include "gpipe/schedule/list_schedule.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"

namespace gpipe {

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
  double low = run_.chunks * all.back() / workers;
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
  if (!given_.balance.empty()) {
    offer(segments_.cost().ends(given_.balance), actions);
    return;
  }
  const int stages = static_cast<int>(placement_.size());
  const auto seconds = [&](int first, int end) { return segments_.cost().seconds(first, end, run_); };
  offer(stage_ends(cut_at(segments_.cost(), stages, [&](int, int a, int b) { return seconds(a, b); })), actions);
  const auto& network = run_.network;
  if (network.inside.bandwidth > 0 || network.between.bandwidth > 0) {
    offer(stage_ends(balance_by_load(segments_.cost(), run_)), actions);
  }
  if (in_flight_.empty() || (best_.fits() && best_.checkpoint == Checkpoints())) return;
  const auto bytes = [&](double limit, int stage, int first, int end) {
    const auto with = segments_.within(static_cast<std::int64_t>(limit), first, end, in_flight_[stage]);
    return std::pair(static_cast<double>(segments_.bytes(first, end, in_flight_[stage], with)), with.seconds);
  };
  for (const double part : {1.0, 0.9, 0.8, 0.7, 0.6}) {  // because the estimates are not exact
    const auto within_memory = [&](int stage, int first, int end) {
      const double limit = part * share(stage);
      const auto [needed, again] = bytes(limit, stage, first, end);
      const double cost = seconds(first, end) + again;
      return needed > limit ? 1e6 * cost * needed / limit : cost;
    };
    offer(stage_ends(cut_at(segments_.cost(), stages, within_memory)), actions);
  }
  if (best_.fits()) return;
  const auto smallest = [&](int stage, int a, int b) { return bytes(0, stage, a, b).first / share(stage); };
  offer(stage_ends(cut_at(segments_.cost(), stages, smallest)), actions);
}

void Contender::improve(std::int64_t& actions) {
  for (bool improved = given_.balance.empty(); improved;) {
    improved = false;
    for (const auto& moved : segments_.cost().near(balance_of(ends_))) {
      if (actions < 0) return;
      improved |= offer(stage_ends(moved), actions);
    }
  }
}

void Contender::deepen(std::int64_t& actions) {
  if (run_.scheduling.depth == 0) return;
  const int workers = 1 + std::ranges::max(placement_);
  const int stages = (static_cast<int>(placement_.size()) + workers - 1) / workers;  // of a worker
  double best = run_.scheduling.depth;
  for (int cells = stages; cells < 2 * workers * stages && actions > 0; ++cells) {
    run_.scheduling.depth = 1.0 * cells / stages;
    auto plan = predicted(parts_of(best_), actions);
    if (!is_better(plan, best_)) continue;
    best_ = std::move(plan);
    best = run_.scheduling.depth;
  }
  run_.scheduling.depth = best;
}

void Contender::polish(std::int64_t& actions) {
  if (whole_) return;
  std::ranges::stable_sort(tried_, is_better);
  const auto same = [](const Plan& a, const Plan& b) {
    return a.balance == b.balance && a.placement == b.placement && a.checkpoint == b.checkpoint;
  };
  tried_.erase(std::unique(tried_.begin(), tried_.end(), same), tried_.end());
  tried_.resize(std::min<std::size_t>(tried_.size(), 8));
  for (auto plan : std::exchange(tried_, {})) {
    while (actions > 0 && step(plan, actions)) continue;
    if (is_better(plan, best_)) best_ = std::move(plan);
  }
}

void Contender::relax(std::int64_t& actions) {
  if (!best_.fits() || in_flight_.empty()) return;
  for (std::size_t s = 0; s < best_.balance.size() && actions > 0; ++s) {
    if (best_.checkpoint.of(static_cast<int>(s)) != Checkpoint::kAlways) continue;
    int low = -1;                                                                                // does not fit
    int high = std::min(run_.chunks, std::ranges::max(in_flight_, {}, &InFlight::cells).cells);  // fits
    while (high - low > 1 && actions > 0) {
      const int count = (low + high) / 2;
      auto fewer = parts_of(best_);
      fewer[s].mode = Checkpoint::in_flight(count);
      auto other = predicted(fewer, actions);
      const bool is_good = other.fits() && other.seconds <= best_.seconds;
      (is_good ? high : low) = count;
      if (is_good) best_ = std::move(other);
    }
  }
}

std::vector<Contender::Part> Contender::parts_of(const Plan& plan) {
  std::vector<Part> parts;
  for (std::size_t s = 0; s < plan.balance.size(); ++s) {
    parts.push_back({plan.placement[s], plan.balance[s], plan.checkpoint.of(static_cast<int>(s))});
  }
  return parts;
}

bool Contender::step(Plan& plan, std::int64_t& actions) const {
  const auto& cost = segments_.cost();
  bool improved = false;
  const auto offer = [&](const std::vector<Part>& parts) {
    if (actions < 0) return;
    auto other = predicted(parts, actions);
    if (!is_better(other, plan)) return;
    plan = std::move(other);
    improved = true;
  };
  for (std::size_t s = 0; s < plan.balance.size(); ++s) {
    auto parts = parts_of(plan);
    auto& mode = parts[s].mode;
    mode = mode == Checkpoint::kNever ? Checkpoint::kAlways : Checkpoint::kNever;
    offer(parts);
  }
  const auto from = parts_of(plan);
  int first = 0;  // layer of the part
  for (auto part = from.begin(); part != from.end(); first += static_cast<int>(part->layers), ++part) {
    for (std::int64_t i = 1; i < part->layers; ++i) {
      if (!cost.can_cut_before(first + static_cast<int>(i))) continue;
      for (const auto& [before, after] : {std::pair(Checkpoint::kAlways, Checkpoint::kAlways),
                                          {Checkpoint::kAlways, Checkpoint::kNever},
                                          {Checkpoint::kNever, Checkpoint::kAlways}}) {
        std::vector<Part> parts(from.begin(), part);
        parts.push_back({part->worker, i, before});
        parts.push_back({part->worker, part->layers - i, after});
        parts.insert(parts.end(), part + 1, from.end());
        offer(parts);
      }
    }
  }
  for (const auto& moved : cost.near(plan.balance)) {
    auto parts = parts_of(plan);
    for (std::size_t s = 0; s < parts.size(); ++s) parts[s].layers = moved[s];
    offer(parts);
  }
  return improved;
}

double Contender::share(int stage) const {
  double all = 0;
  for (std::size_t s = 0; s < placement_.size(); ++s) {
    if (devices_.of(placement_[s]) == devices_.of(placement_[stage])) all += in_flight_[s].cells;
  }
  return static_cast<double>(devices_.memory(devices_.of(placement_[stage]))) * in_flight_[stage].cells / all;
}

Plan Contender::predicted(const std::vector<Part>& parts, std::int64_t& actions) const {
  auto run = run_;
  run.scheduling.placement.clear();
  std::vector<std::int64_t> balance;
  std::vector<Checkpoint> modes;
  const bool can_join = std::ranges::adjacent_find(placement_) == placement_.end();  // else two stages would be one
  for (const auto& part : parts) {
    const bool is_like_before = !modes.empty() && modes.back() == Checkpoint::kNever &&
                                part.mode == Checkpoint::kNever && run.scheduling.placement.back() == part.worker;
    if (can_join && is_like_before) {
      balance.back() += part.layers;
      continue;
    }
    run.scheduling.placement.push_back(part.worker);
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

Plan Contender::priced(const std::vector<int>& ends, const std::vector<int>& prices, std::int64_t& actions) {
  std::vector<Part> parts;
  for (int stage = 0, first = 0; const int end : ends) {
    const int worker = placement_[stage];
    const int price = prices[devices_.of(worker)];
    const auto with = price == 0 ? Recomputation()
                      : whole_   ? segments_.whole(first, end)
                                 : segments_.at(price, first, end, in_flight_[stage]);
    for (const auto& segment : segments_.segments(first, end, with)) {
      parts.push_back({worker, segment.first - first, Checkpoint::kNever});
      parts.push_back({worker, segment.end - segment.first, Checkpoint::kAlways});
      first = segment.end;
    }
    parts.push_back({worker, end - first, Checkpoint::kNever});
    first = end;
    ++stage;
  }
  std::erase_if(parts, [](const Part& each) { return each.layers == 0; });
  return predicted(parts, actions);
}

Plan Contender::solve(const std::vector<int>& ends, std::int64_t& actions) {
  std::vector<int> low(devices_.count());  // the price that is known to be too low
  auto plan = priced(ends, low, actions);
  if (plan.fits() || given_.checkpoint) return plan;
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
  while (!plan.fits() && raise(plan)) plan = priced(ends, high, actions);
  if (!plan.fits()) return plan;
  for (;;) {
    std::vector<int> middle = high;
    for (int d = 0; d < devices_.count(); ++d) middle[d] = high[d] - low[d] > 1 ? (low[d] + high[d]) / 2 : high[d];
    if (middle == high) return plan;
    auto other = priced(ends, middle, actions);
    if (other.fits()) {
      high = middle;
      if (other.seconds <= plan.seconds) plan = std::move(other);
      continue;
    }
    const auto bytes = devices_.sum(other.bytes);
    for (int d = 0; d < devices_.count(); ++d) {
      (bytes[d] > devices_.memory(d) ? low : high)[d] = middle[d];
    }
  }
}

bool Contender::offer(const std::vector<int>& ends, std::int64_t& actions) {
  auto plan = solve(ends, actions);
  if (!in_flight_.empty()) tried_.push_back(plan);
  if (!ends_.empty() && !is_better(plan, best_)) return false;
  best_ = std::move(plan);
  ends_ = ends;
  return true;
}

}  // namespace gpipe
