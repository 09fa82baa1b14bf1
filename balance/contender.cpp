#include "balance/contender.h"

#include <algorithm>

#include "balance/cut.h"
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
      whole_(!options.balance.empty() || run_.scheduling.schedule.starts_with('@')) {
  if (!devices_.is_limited() || given_.checkpoint) return;
  const int stages = static_cast<int>(placement_.size());
  const Layout layout{stages, run_.chunks, placement_};
  const auto schedule = schedule_source(run_.scheduling.schedule, stages, 1, placement_).make(layout);
  const auto peaks = verify(layout, {}, with_recomputes(schedule, Checkpoint::kAlways, layout));
  for (int s = 0; s < stages; ++s) in_flight_.push_back({peaks.live[s], peaks.graphs[s]});
}

double Contender::least_seconds() const {
  const auto& cost = segments_.cost();
  const int layers = cost.layers();
  const int workers = 1 + std::ranges::max(placement_);
  const auto work = [](const LayerProfile& of) {
    return of.forward + std::min(of.backward, of.input_gradient + of.weight_gradient);
  };
  const auto input_gradient = [](const LayerProfile& of) { return std::min(of.backward, of.input_gradient); };
  const double all = run_.chunks * work(cost.sum(0, layers));
  double low = all / workers;
  if (std::ssize(placement_) != workers) return low;
  const auto suffices = [&](double seconds) {
    int end = 0;
    for (int worker = 0; worker < workers; ++worker) {
      const auto before = cost.sum(0, end);
      const double left = seconds - before.forward;
      const auto fits = [&](const LayerProfile& stage) {
        return run_.chunks * work(stage) <= left &&
               run_.chunks * (stage.forward + input_gradient(stage)) <= left - input_gradient(before);
      };
      for (const int first = end; end < layers && fits(cost.sum(first, end + 1));) ++end;
    }
    return end == layers;
  };
  for (double high = all; high - low > 1e-3 * low;) {
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
    for (const auto& moved : segments_.cost().near(balance_of(ends_), 1)) {
      if (actions < 0) return;
      improved |= offer(stage_ends(moved), actions);
    }
  }
}

void Contender::polish(std::int64_t& actions) {
  if (whole_) return;
  std::ranges::stable_sort(tried_, is_better);
  tried_.resize(std::min<std::size_t>(tried_.size(), 4));
  for (auto plan : std::exchange(tried_, {})) {
    while (actions > 0 && step(plan, actions)) continue;
    if (is_better(plan, best_)) best_ = std::move(plan);
  }
}

void Contender::relax(std::int64_t& actions) {
  if (!best_.fits() || in_flight_.empty()) return;
  auto modes = best_.checkpoint.modes;
  for (std::size_t s = 0; s < modes.size() && actions > 0; ++s) {
    if (modes[s] != Checkpoint::kAlways) continue;
    int low = -1;                                                                                // does not fit
    int high = std::min(run_.chunks, std::ranges::max(in_flight_, {}, &InFlight::cells).cells);  // fits
    while (high - low > 1 && actions > 0) {
      const int count = (low + high) / 2;
      auto fewer = modes;
      fewer[s] = Checkpoint::in_flight(count);
      auto other = predicted(best_.balance, best_.placement, fewer, actions);
      const bool is_good = other.fits() && other.seconds <= best_.seconds;
      (is_good ? high : low) = count;
      if (is_good) best_ = std::move(other);
    }
    modes = best_.checkpoint.modes;
  }
}

bool Contender::step(Plan& plan, std::int64_t& actions) const {
  bool improved = false;
  const auto offer = [&](const std::vector<std::int64_t>& balance, const std::vector<int>& placement,
                         const std::vector<Checkpoint>& modes) {
    if (actions < 0) return;
    auto other = predicted(balance, placement, modes, actions);
    if (!is_better(other, plan)) return;
    plan = std::move(other);
    improved = true;
  };
  const auto modes_of = [](const Plan& of) {
    std::vector<Checkpoint> modes;
    for (std::size_t s = 0; s < of.balance.size(); ++s) modes.push_back(of.checkpoint.of(static_cast<int>(s)));
    return modes;
  };
  for (const auto& moved : segments_.cost().near(plan.balance, 1)) offer(moved, plan.placement, modes_of(plan));
  for (std::size_t s = 0; s < plan.balance.size(); ++s) {
    auto modes = modes_of(plan);
    modes[s] = modes[s] == Checkpoint::kNever ? Checkpoint::kAlways : Checkpoint::kNever;
    offer(plan.balance, plan.placement, modes);
  }
  const auto from = plan;
  for (std::size_t s = 0, first = 0; s < from.balance.size(); first += from.balance[s++]) {
    for (std::int64_t i = 0; i < from.balance[s] && from.balance[s] > 1; ++i) {
      const int layer = static_cast<int>(first) + static_cast<int>(i);
      if (modes_of(from)[s] != Checkpoint::kNever || !segments_.cost().can_cut_before(layer) ||
          !segments_.cost().can_cut_before(layer + 1)) {
        continue;
      }
      auto [balance, placement, modes] = std::tuple(from.balance, from.placement, modes_of(from));
      const auto at = static_cast<std::ptrdiff_t>(s);
      const auto rest = std::array{i, std::int64_t{1}, from.balance[s] - i - 1};
      modes.insert(modes.begin() + at, 2, Checkpoint::kNever);
      modes[s + 1] = Checkpoint::kAlways;
      placement.insert(placement.begin() + at, 2, placement[s]);
      balance.erase(balance.begin() + at);
      balance.insert(balance.begin() + at, rest.begin(), rest.end());
      for (const auto part : {at + 2, at}) {
        if (balance[part] > 0) continue;
        modes.erase(modes.begin() + part);
        placement.erase(placement.begin() + part);
        balance.erase(balance.begin() + part);
      }
      offer(balance, placement, modes);
    }
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

Plan Contender::predicted(std::vector<std::int64_t> balance, std::vector<int> placement, Checkpoints modes,
                          std::int64_t& actions) const {
  auto run = run_;
  run.scheduling.placement = std::move(placement);
  run.checkpoint = modes;
  actions -= static_cast<std::int64_t>(balance.size()) * run.chunks * 4;  // F, R, I, W
  Plan plan{predict(segments_.cost(), balance, run), run.chunks, std::move(modes), run.scheduling.schedule,
            run.network.replicas};
  if (devices_.is_limited()) plan.missing = std::max<std::int64_t>(0, devices_.fullest(plan.bytes).second);
  return plan;
}

Plan Contender::priced(const std::vector<int>& ends, const std::vector<int>& prices, std::int64_t& actions) {
  std::vector<std::int64_t> balance;
  std::vector<int> placement;
  std::vector<Checkpoint> modes;
  const auto add = [&](int stage, int layers, Checkpoint mode) {
    if (layers == 0) return;
    balance.push_back(layers);
    placement.push_back(placement_[stage]);
    modes.push_back(mode);
  };
  for (int stage = 0, first = 0; const int end : ends) {
    const int price = prices[devices_.of(placement_[stage])];
    const auto with = price == 0 ? Recomputation()
                      : whole_   ? segments_.whole(first, end)
                                 : segments_.at(price, first, end, in_flight_[stage]);
    for (const auto& segment : segments_.segments(first, end, with)) {
      add(stage, segment.first - first, Checkpoint::kNever);
      add(stage, segment.end - segment.first, Checkpoint::kAlways);
      first = segment.end;
    }
    add(stage, end - first, Checkpoint::kNever);
    first = end;
    ++stage;
  }
  const bool none = std::ranges::count(modes, Checkpoint::kNever) == std::ssize(modes);
  return predicted(balance, placement, none ? Checkpoints() : Checkpoints(modes), actions);
}

Plan Contender::solve(const std::vector<int>& ends, std::int64_t& actions) {
  if (given_.checkpoint) return predicted(balance_of(ends), placement_, *given_.checkpoint, actions);
  std::vector<int> low(devices_.count());  // the price that is known to be too low
  auto plan = priced(ends, low, actions);
  if (plan.fits()) return plan;
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
