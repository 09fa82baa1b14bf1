#include "balance/plan.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_format.h"
#include "balance/contender.h"
#include "balance/cut.h"
#include "balance/report.h"
#include "gpipe/base/checks.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

using absl::StrFormat;

constexpr double kClose = 1.03;                     // plans whose times differ by less are equally fast
constexpr std::int64_t kMostCellsOfPlan = 1 << 15;  // stages x micro-batches of a plan
constexpr std::size_t kImproved = 8;                // plans that are refined

/// Orders plans that are equally fast, so that profiles that differ a little lead to one choice.
std::array<std::int64_t, 4> order(const Plan& plan) {
  std::int64_t recomputed = 0;  // layers
  for (std::size_t s = 0; s < plan.balance.size(); ++s) {
    if (plan.checkpoint.of(static_cast<int>(s)) != Checkpoint::kNever) recomputed += plan.balance[s];
  }
  const auto rules = schedule_rules();
  const auto rule = std::ranges::find(rules, plan.schedule, &ScheduleRule::name) - rules.begin();
  return {recomputed, std::ssize(plan.balance), rule, plan.chunks};
}

void check(const std::vector<Profile>& profiles, const PlanOptions& options) {
  if (profiles.empty()) refuse_argument("give at least one profile");
  if (options.devices.empty()) refuse_argument("give at least one device");
  if (profiles.front().layers.empty()) refuse_argument("the model has no layers");
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

/// A number of devices, more than there are, on which each stage fits by the estimates; 0 for none.
int fewest_devices(Segments& segments, std::int64_t memory, int chunks, int devices) {
  for (int count = devices + 1; count <= std::min(64, segments.cost().most_stages()); count += count / 8 + 1) {
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

/// Whether a rule has a schedule for stages on these workers.
bool fits_rule(const ScheduleRule& rule, const std::vector<int>& placement) {
  const Layout layout{static_cast<int>(placement.size()), 2 * (1 + std::ranges::max(placement)), placement};
  return rule.misfit(layout).empty() && too_few_stages(rule.name, placement).empty();
}

/// A list schedule on these workers.
Scheduling listed(std::vector<int> placement) {
  const int workers = 1 + std::ranges::max(placement);
  return {kAnySchedule, 1, std::move(placement), 1.0 * workers};
}

std::string why_not(const Contender& smallest) {
  const auto& plan = smallest.best();
  const auto [device, missing] = smallest.devices().fullest(plan.bytes);
  const auto memory = smallest.devices().memory(device);
  auto reason = StrFormat(
      "nothing fits: the plan that lacks least, %s with %d chunks, needs %s on %s, which has %s, %s too few; ",
      schedule_to_text(plan), plan.chunks, bytes_to_text(memory + missing), smallest.devices().name(device),
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
    if (!fits_rule(rule, placement)) return;
    auto schedule = rule.generate(layout);
    if (std::find(lists.begin(), lists.end(), schedule) != lists.end()) return;
    lists.push_back(std::move(schedule));
    found.push_back({std::string(rule.name), 1, std::move(placement)});
  };
  for (const auto& rule : schedule_rules()) add(rule, looped_placement(workers, workers));
  if (workers == 1) return found;
  found.push_back(listed(looped_placement(workers, workers)));
  if (2 * workers > layers) return found;
  for (const auto& rule : schedule_rules()) {
    add(rule, looped_placement(workers, 2 * workers));
    add(rule, v_placement(2 * workers));
  }
  found.push_back(listed(looped_placement(workers, 2 * workers)));
  found.push_back(listed(v_placement(2 * workers)));
  return found;
}

namespace {

/// The schedules and placements to try.
std::vector<Scheduling> to_try(const PlanOptions& options, int workers, int most_stages) {
  const int stages = options.balance.empty() ? options.stages : static_cast<int>(options.balance.size());
  if (workers > most_stages) return {};
  const auto all = all_schedulings(workers, most_stages);
  std::vector<Scheduling> tried;
  const auto add = [&](const std::string& name, const std::vector<int>& placement) {
    if (fits_rule(schedule_rule(name), placement)) tried.push_back({name, 1, placement});
  };
  const auto add_rules = [&](const std::vector<int>& placement) {
    for (const auto& rule : schedule_rules()) add(std::string(rule.name), placement);
    tried.push_back(listed(placement));
  };
  const bool loops = stages > 2 * workers && stages % workers == 0;
  if (options.schedulings.empty()) loops ? add_rules(looped_placement(workers, stages)) : void(tried = all);
  for (const auto& [name, per_worker, placement, depth] : options.schedulings) {
    if (depth > 0) {
      tried.push_back({name, 1, placement, depth});
    } else if (has_lists(name)) {
      tried.push_back({name, 1, lists_of(name).layout.placement});
    } else if (name == kAnySchedule && placement.empty()) {
      tried.insert(tried.end(), all.begin(), all.end());
    } else if (name == kAnySchedule) {
      add_rules(placement);
    } else if (!placement.empty()) {
      tried.push_back({name, 1, placement});
    } else {
      add(name, looped_placement(workers, workers));
      if (tried.empty() || workers > 1) {
        add(name, looped_placement(workers, 2 * workers));
        add(name, v_placement(2 * workers));
      }
      if (loops) add(name, looped_placement(workers, stages));
    }
  }
  std::erase_if(tried, [&](const Scheduling& each) {
    const auto count = static_cast<int>(each.placement.size());
    const auto modes = options.checkpoint ? static_cast<int>(options.checkpoint->modes.size()) : 1;
    return count > most_stages || 1 + std::ranges::max(each.placement) != workers || (stages > 0 && count != stages) ||
           (modes > 1 && modes != count);
  });
  return tried;
}

/// The numbers of micro-batches to try that have the size of a profile.
std::vector<int> chunks_of(const Profile& profile, std::int64_t samples, const PlanOptions& options) {
  const auto size = profile.samples;
  if (options.chunks.empty()) return {static_cast<int>((samples + size - 1) / size)};
  auto chunks = options.chunks;
  std::erase_if(chunks, [&](std::int64_t count) { return count > samples || (samples + count - 1) / count != size; });
  return chunks;
}

/// What 5 % more memory on each device saves in a step: both memories get the same search.
double saved_by_memory(const Contender& best, PlanOptions options) {
  if (options.memory.empty()) return 0;
  const auto seconds = [&] {
    Contender contender(best.segments(), best.run(), options);
    auto actions = options.most_actions / 8;
    contender.start(actions);
    contender.refine(actions);
    return contender.best().seconds;
  };
  const double now = seconds();
  for (auto& bytes : options.memory) bytes += bytes / 20;
  return std::max(0.0, now - seconds());
}

/// All that is tried.
std::vector<std::unique_ptr<Contender>> contenders_of(const std::vector<Profile>& profiles,
                                                      const std::vector<std::unique_ptr<Segments>>& segments,
                                                      const PlanOptions& options) {
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
      for (const int chunks : chunks_of(profiles[i], samples, options)) {
        for (const auto& scheduling : tried) {
          const auto& name = scheduling.schedule;
          if (has_lists(name) && lists_of(name).layout.micro_batches != chunks) continue;
          if (chunks > 1 && std::ssize(scheduling.placement) * chunks > kMostCellsOfPlan) continue;
          auto network = options.network;
          network.replicas = replicas;
          const RunOptions run{chunks, Checkpoint::kNever, network, options.copies, scheduling};
          contenders.push_back(std::make_unique<Contender>(*segments[i], run, options));
        }
      }
    }
  }
  if (contenders.empty()) {
    refuse_argument("no schedule and number of replicas suits ", devices, " devices, ", options.samples,
                    " samples and a model that allows ", most_stages, " stages, with at most ", kMostCellsOfPlan,
                    " cells (stages x micro-batches); change one of them");
  }
  std::ranges::stable_sort(contenders, {}, [](const auto& each) { return each->least_seconds(); });
  return contenders;
}

}  // namespace

Plans plan(const std::vector<Profile>& profiles, const PlanOptions& options) {
  check(profiles, options);
  std::vector<std::unique_ptr<Segments>> segments;
  for (const auto& profile : profiles) segments.push_back(std::make_unique<Segments>(profile));
  const auto contenders = contenders_of(profiles, segments, options);
  Plans found;
  found.least_seconds = contenders.front()->least_seconds();
  auto actions = options.most_actions;
  double fastest = std::numeric_limits<double>::infinity();
  std::vector<Contender*> ordered;
  for (auto& each : contenders) {
    if (actions < 0 && each->least_seconds() > fastest) continue;
    each->start(actions);
    if (each->best().fits()) fastest = std::min(fastest, each->best().seconds);
    ordered.push_back(each.get());
  }
  const auto before = [](const Contender* a, const Contender* b) {
    const auto key = [](const Plan& it) {
      return std::tuple(!it.fits(), it.fits() && fills_and_drains(it.schedule), it.missing, it.seconds);
    };
    return key(a->best()) < key(b->best());
  };
  std::ranges::stable_sort(ordered, before);
  for (std::size_t i = 0; i < std::min(kImproved, ordered.size()); ++i) {
    auto share = std::max<std::int64_t>(actions, options.most_actions / 4) / static_cast<std::int64_t>(kImproved - i);
    actions -= share;
    ordered[i]->refine(share);
    actions += share;
  }
  std::ranges::stable_sort(ordered, before);
  for (const auto* each : ordered) found.plans.push_back(each->best());
  if (!found.plans.front().fits()) {
    found.reason = why_not(*ordered.front());
    return found;
  }
  const auto close = [&](const Plan& it) {
    const auto& first = found.plans.front();
    return it.fits() && it.seconds <= kClose * first.seconds &&
           fills_and_drains(it.schedule) == fills_and_drains(first.schedule);
  };
  auto chosen = found.plans.begin();
  for (auto it = found.plans.begin(); it != found.plans.end(); ++it) {
    if (close(*it) && order(*it) < order(*chosen)) chosen = it;
  }
  found.more_memory_saves = saved_by_memory(*ordered[chosen - found.plans.begin()], options);
  std::rotate(found.plans.begin(), chosen, chosen + 1);
  return found;
}

}  // namespace gpipe
