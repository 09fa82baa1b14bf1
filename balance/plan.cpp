#include "balance/plan.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_format.h"
#include "balance/cut.h"
#include "balance/report.h"
#include "balance/segments.h"
#include "gpipe/base/checks.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

using absl::StrFormat;

constexpr double kClose = 1.03;                     // plans whose times differ by less are equally fast
constexpr std::int64_t kMostCellsOfPlan = 1 << 13;  // stages x micro-batches of a plan
constexpr std::size_t kImproved = 8;                // plans whose cuts are moved

/// The devices of one replica, and their memory.
class Devices {
 public:
  Devices(const PlanOptions& options, int workers) {
    for (int w = 0; w < workers; ++w) {
      const auto& name = options.devices[w];
      const auto found = std::ranges::find(names_, name);
      device_.push_back(static_cast<int>(found - names_.begin()));
      if (found != names_.end()) continue;
      names_.push_back(name);
      if (!options.memory.empty()) memory_.push_back(options.memory[options.memory.size() == 1 ? 0 : w]);
    }
  }

  bool is_limited() const { return !memory_.empty(); }
  int count() const { return static_cast<int>(names_.size()); }
  int of(int worker) const { return device_[worker]; }
  std::int64_t memory(int device) const { return memory_[device]; }
  const std::string& name(int device) const { return names_[device]; }

  std::vector<std::int64_t> sum(const std::vector<std::int64_t>& of_workers) const {
    std::vector<std::int64_t> bytes(count());
    for (std::size_t w = 0; w < of_workers.size(); ++w) bytes[device_[w]] += of_workers[w];
    return bytes;
  }
  /// The device that lacks most bytes, and how many it lacks; negative if all fit.
  std::pair<int, std::int64_t> fullest(const std::vector<std::int64_t>& of_workers) const {
    std::pair<int, std::int64_t> most = {0, std::numeric_limits<std::int64_t>::min()};
    const auto bytes = sum(of_workers);
    for (int d = 0; d < count(); ++d) {
      const auto missing = bytes[d] - (is_limited() ? memory(d) : 0);
      if (missing > most.second) most = {d, missing};
    }
    return most;
  }

 private:
  std::vector<std::string> names_;
  std::vector<std::int64_t> memory_;
  std::vector<int> device_;  // by worker
};

/// Whether `a` lacks fewer bytes, or as many and is faster.
bool is_better(const Plan& a, const Plan& b) {
  return std::pair(a.missing, a.seconds) < std::pair(b.missing, b.seconds);
}

/// Plans for one profile, schedule, placement and number of replicas.
class Contender {
 public:
  Contender(Segments& segments, RunOptions run, const PlanOptions& options)
      : segments_(segments),
        run_(std::move(run)),
        placement_(run_.scheduling.placement),
        devices_(options, 1 + std::ranges::max(placement_)),
        given_(options),
        whole_(!options.balance.empty() || run_.scheduling.schedule.starts_with('@')) {
    if (!devices_.is_limited() || given_.checkpoint) return;
    const int stages = static_cast<int>(placement_.size());
    const Layout layout{stages, run_.chunks, placement_};
    const auto schedule = schedule_source(run_.scheduling.schedule, stages, 1, placement_).make(layout);
    const auto peaks = verify(layout, {}, with_recomputes(schedule, Checkpoint::kAlways, layout));
    for (int s = 0; s < stages; ++s) in_flight_.push_back({peaks.live[s], peaks.graphs[s]});
  }

  const Plan& best() const { return best_; }
  const Devices& devices() const { return devices_; }
  Segments& segments() const { return segments_; }
  /// No plan is faster.
  double least_seconds() const {
    const auto all = segments_.cost().sum(0, segments_.cost().layers());
    const double work = all.forward + std::min(all.backward, all.input_gradient + all.weight_gradient);
    return run_.chunks * work / (1 + std::ranges::max(placement_));
  }

  void start(std::int64_t& actions) {
    if (!given_.balance.empty()) {
      offer(segments_.cost().ends(given_.balance), actions);
      return;
    }
    const int stages = static_cast<int>(placement_.size());
    const auto seconds = [&](int first, int end) {
      auto run = run_;
      run.checkpoint = Checkpoint::kNever;
      return segments_.cost().seconds(first, end, run);
    };
    offer(stage_ends(cut_at(segments_.cost(), stages, [&](int, int a, int b) { return seconds(a, b); })), actions);
    const auto& network = run_.network;
    if (network.inside.bandwidth > 0 || network.between.bandwidth > 0) {
      offer(stage_ends(balance_by_load(segments_.cost(), run_)), actions);
    }
    if (in_flight_.empty() || best_.checkpoint == Checkpoints()) return;
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

  /// Moves cuts by a layer as long as the step gets better.
  void improve(std::int64_t& actions) {
    for (bool improved = given_.balance.empty(); improved;) {
      improved = false;
      for (const auto& moved : segments_.cost().near(balance_of(ends_), 1)) {
        if (actions < 0) return;
        improved |= offer(stage_ends(moved), actions);
      }
    }
  }

  /// Changes the segments of the best plans, one at a time, as long as this helps: moves an end by a layer, recomputes a
  /// segment or not, recomputes a layer by itself.
  void polish(std::int64_t& actions) {
    if (whole_ || given_.checkpoint || !devices_.is_limited()) return;
    std::ranges::stable_sort(tried_, is_better);
    tried_.resize(std::min<std::size_t>(tried_.size(), 4));
    for (auto plan : std::exchange(tried_, {})) {
      while (actions > 0 && step(plan, actions)) continue;
      if (is_better(plan, best_)) best_ = std::move(plan);
    }
  }

  /// Recomputes fewer micro-batches of a segment where the memory allows it.
  void relax(std::int64_t& actions) {
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

 private:
  /// Improves a plan by one kind of change each. Returns whether it did.
  bool step(Plan& plan, std::int64_t& actions) const {
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

  static std::vector<std::int64_t> balance_of(const std::vector<int>& ends) {
    std::vector<std::int64_t> balance;
    for (int first = 0; const int end : ends) balance.push_back(end - std::exchange(first, end));
    return balance;
  }

  /// A stage's share of its device's memory.
  double share(int stage) const {
    double all = 0;
    for (std::size_t s = 0; s < placement_.size(); ++s) {
      if (devices_.of(placement_[s]) == devices_.of(placement_[stage])) all += in_flight_[s].cells;
    }
    return static_cast<double>(devices_.memory(devices_.of(placement_[stage]))) * in_flight_[stage].cells / all;
  }

  Plan predicted(std::vector<std::int64_t> balance, std::vector<int> placement, Checkpoints modes,
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

  /// The plan for a cut, with the recomputation of each device's stages that the price says.
  Plan priced(const std::vector<int>& ends, const std::vector<int>& prices, std::int64_t& actions) {
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

  /// The fastest plan for a cut that fits; if none does, the one that needs the fewest bytes.
  Plan solve(const std::vector<int>& ends, std::int64_t& actions) {
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

  bool offer(const std::vector<int>& ends, std::int64_t& actions) {
    auto plan = solve(ends, actions);
    tried_.push_back(plan);
    if (!ends_.empty() && !is_better(plan, best_)) return false;
    best_ = std::move(plan);
    ends_ = ends;
    return true;
  }

  Segments& segments_;
  const RunOptions run_;
  const std::vector<int> placement_;  // of stages before they are cut into segments
  const Devices devices_;
  const PlanOptions& given_;
  const bool whole_;                 // stages are recomputed as a whole, or not at all
  std::vector<InFlight> in_flight_;  // by stage; empty if there is nothing to choose
  Plan best_;
  std::vector<Plan> tried_;
  std::vector<int> ends_;  // of the stages of the best plan
};

/// Orders plans that are equally fast, so that profiles that differ a little lead to one choice.
std::array<std::int64_t, 4> order(const Plan& plan) {
  const auto recomputed = std::ranges::count_if(plan.checkpoint.modes, [](auto mode) { return mode != Checkpoint(); });
  const auto rules = schedule_rules();
  const auto rule = std::ranges::find(rules, plan.schedule, &ScheduleRule::name) - rules.begin();
  return {recomputed, std::ssize(plan.balance), rule, plan.chunks};
}

void check(const std::vector<Profile>& profiles, const PlanOptions& options) {
  if (profiles.empty()) refuse_argument("give at least one profile");
  if (options.devices.empty()) refuse_argument("give at least one device");
  if (options.samples < 1) refuse_argument("samples must be positive, but is ", options.samples);
  if (options.replicas < 0) refuse_argument("replicas must not be negative, but is ", options.replicas);
  if (options.memory.size() > 1 && options.memory.size() != options.devices.size()) {
    refuse_argument("there are ", options.memory.size(), " sizes of memory for ", options.devices.size(),
                    " devices; give one, or one per device");
  }
  for (const auto bytes : options.memory) {
    if (bytes < 1) refuse_argument("memory must be positive, but is ", bytes);
  }
  gpipe::check(options.network);
  for (const auto& profile : profiles) {
    if (profile.samples < 1) refuse_argument("a profile must have at least one sample, but has ", profile.samples);
    if (profile.layers.size() == profiles.front().layers.size()) continue;
    refuse_argument("profiles have ", profiles.front().layers.size(), " and ", profile.layers.size(),
                    " layers; give profiles of one model");
  }
}

/// The fewest devices, more than there are, on which each stage fits by the estimates; 0 for none.
int fewest_devices(Segments& segments, std::int64_t memory, int chunks, int devices) {
  for (int count = devices + 1; count <= std::min(64, segments.cost().most_stages()); ++count) {
    const auto needed = [&](int stage, int first, int end) {
      const InFlight in_flight{std::min(chunks, count - stage), 1};
      return static_cast<double>(segments.bytes(first, end, in_flight, segments.within(memory, first, end, in_flight)));
    };
    double most = 0;
    for (int stage = 0, first = 0; const int end : stage_ends(cut_at(segments.cost(), count, needed))) {
      most = std::max(most, needed(stage++, first, end));
      first = end;
    }
    if (most <= static_cast<double>(memory)) return count;
  }
  return 0;
}

std::string why_not(const Contender& smallest) {
  const auto& plan = smallest.best();
  const auto [device, missing] = smallest.devices().fullest(plan.bytes);
  const auto memory = smallest.devices().memory(device);
  auto reason = StrFormat(
      "nothing fits: the plan that lacks least, %s with %d chunks, needs %s on %s, which has %s, %s too few; ",
      plan.schedule, plan.chunks, bytes_to_text(memory + missing), smallest.devices().name(device),
      bytes_to_text(memory), bytes_to_text(missing));
  auto& segments = smallest.segments();
  for (int layer = 0; layer < segments.cost().layers(); ++layer) {
    const auto alone = segments.bytes(layer, layer + 1, {});
    if (alone <= memory) continue;
    return reason +
           StrFormat("layer %d alone needs %s: use a smaller layer or micro-batch", layer, bytes_to_text(alone));
  }
  const int workers = static_cast<int>(plan.bytes.size());
  const int devices = fewest_devices(segments, memory, plan.chunks, workers);
  const auto more =
      devices > 0 ? StrFormat("use %d devices%s, or ", devices, plan.replicas > 1 ? " per replica" : "") : "";
  return reason + more + "give the device more memory, or use smaller micro-batches";
}

}  // namespace

const Plan& Plans::best() const {
  if (!fits()) throw std::runtime_error(reason);
  return plans.front();
}

std::vector<Scheduling> all_schedulings(int workers, int layers) {
  std::vector<Scheduling> found;
  std::vector<Schedule> lists;
  const auto add = [&](const ScheduleRule& rule, std::vector<int> placement) {
    const Layout layout{static_cast<int>(placement.size()), 2 * workers, placement};
    if (layout.workers() != workers || !rule.misfit(layout).empty()) return;
    if (!too_few_stages(rule.name, layout.placement).empty()) return;
    auto schedule = rule.generate(layout);
    if (std::find(lists.begin(), lists.end(), schedule) != lists.end()) return;
    lists.push_back(std::move(schedule));
    found.push_back({std::string(rule.name), 1, std::move(placement)});
  };
  for (const auto& rule : schedule_rules()) add(rule, looped_placement(workers, workers));
  if (workers == 1 || 2 * workers > layers) return found;
  for (const auto& rule : schedule_rules()) {
    add(rule, looped_placement(workers, 2 * workers));
    add(rule, v_placement(2 * workers));
  }
  return found;
}

namespace {

/// The schedules and placements to try.
std::vector<Scheduling> to_try(const PlanOptions& options, int workers, int most_stages) {
  const auto all = all_schedulings(workers, most_stages);
  auto tried = options.schedulings.empty() ? all : std::vector<Scheduling>();
  for (const auto& given : options.schedulings) {
    if (given.schedule.starts_with('@')) {
      tried.push_back({given.schedule, 1, read_schedule(given.schedule.substr(1)).layout.placement});
    } else if (given.schedule == kAnySchedule) {
      std::ranges::copy_if(all, std::back_inserter(tried),
                           [&](const Scheduling& each) { return each.placement == given.placement; });
    } else if (!given.placement.empty()) {
      tried.push_back(given);
    } else {
      for (const auto& placement :
           {looped_placement(workers, workers), looped_placement(workers, 2 * workers), v_placement(2 * workers)}) {
        const auto stages = static_cast<int>(placement.size());
        const bool fits = schedule_rule(given.schedule).misfit({stages, 2 * workers, placement}).empty() &&
                          too_few_stages(given.schedule, placement).empty();
        if (fits && (stages == workers || workers > 1)) tried.push_back({given.schedule, 1, placement});
      }
    }
  }
  std::erase_if(tried, [&](const Scheduling& each) {
    const auto stages = static_cast<int>(each.placement.size());
    return stages > most_stages || 1 + std::ranges::max(each.placement) != workers ||
           (options.stages > 0 && stages != options.stages) ||
           (!options.balance.empty() && stages != std::ssize(options.balance));
  });
  return tried;
}

}  // namespace

Plans plan(const std::vector<Profile>& profiles, const PlanOptions& options) {
  check(profiles, options);
  std::vector<std::unique_ptr<Segments>> segments;
  for (const auto& profile : profiles) segments.push_back(std::make_unique<Segments>(profile));
  const int devices = static_cast<int>(options.devices.size());
  const int most_stages = segments.front()->cost().most_stages();
  std::vector<std::unique_ptr<Contender>> contenders;
  for (int replicas = devices; replicas >= 1; --replicas) {
    if (devices % replicas != 0 || options.samples % replicas != 0) continue;
    if (options.replicas != 0 && options.replicas != replicas) continue;
    const int workers = devices / replicas;
    const auto tried = to_try(options, workers, most_stages);
    for (std::size_t i = 0; i < profiles.size(); ++i) {
      const auto samples = options.samples / replicas;
      if (replicas > 1 && samples % profiles[i].samples != 0) continue;
      const auto chunks =
          options.chunks > 0 ? options.chunks : (samples + profiles[i].samples - 1) / profiles[i].samples;
      for (const auto& scheduling : tried) {
        if (chunks > 1 && std::ssize(scheduling.placement) * chunks > kMostCellsOfPlan) continue;
        auto network = options.network;
        network.replicas = replicas;
        const RunOptions run{static_cast<int>(chunks), {}, network, options.copies, scheduling};
        contenders.push_back(std::make_unique<Contender>(*segments[i], run, options));
      }
    }
  }
  if (contenders.empty()) {
    refuse_argument("no schedule and number of replicas suits ", devices, " devices, ", options.samples,
                    " samples and a model that allows ", most_stages, " stages; change one of them");
  }
  std::ranges::stable_sort(contenders, {}, [](const auto& each) { return each->least_seconds(); });
  auto actions = options.most_actions;
  double fastest = std::numeric_limits<double>::infinity();
  std::vector<Contender*> ordered;
  for (auto& each : contenders) {
    if (actions < 0 && each->least_seconds() > fastest) continue;
    each->start(actions);
    if (each->best().fits()) fastest = std::min(fastest, each->best().seconds);
    ordered.push_back(each.get());
  }
  const auto before = [](const Contender* a, const Contender* b) { return is_better(a->best(), b->best()); };
  std::ranges::stable_sort(ordered, before);
  for (std::size_t i = 0; i < std::min(kImproved, ordered.size()); ++i) {
    auto share = std::max<std::int64_t>(actions, options.most_actions / 4) / static_cast<std::int64_t>(kImproved - i);
    actions -= share;
    ordered[i]->improve(share);
    ordered[i]->polish(share);
    ordered[i]->relax(share);
    actions += share;
  }
  std::ranges::stable_sort(ordered, before);
  Plans found;
  for (const auto* each : ordered) found.plans.push_back(each->best());
  if (!found.plans.front().fits()) {
    found.reason = why_not(*ordered.front());
    return found;
  }
  const auto first_of = [&](bool drains) {
    return std::ranges::find_if(found.plans,
                                [&](const Plan& it) { return it.fits() && fills_and_drains(it.schedule) == drains; });
  };
  if (const auto first = first_of(false); first != found.plans.end())
    std::rotate(found.plans.begin(), first, first + 1);
  const auto close = [&](const Plan& it) {
    const auto& first = found.plans.front();
    return it.fits() && it.seconds <= kClose * first.seconds &&
           fills_and_drains(it.schedule) == fills_and_drains(first.schedule);
  };
  auto chosen = found.plans.begin();
  for (auto it = found.plans.begin(); it != found.plans.end(); ++it) {
    if (close(*it) && order(*it) < order(*chosen)) chosen = it;
  }
  std::rotate(found.plans.begin(), chosen, chosen + 1);
  return found;
}

}  // namespace gpipe
