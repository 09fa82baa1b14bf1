// Draws random cases, prints them, and makes those that fail smaller.
#include "gpipe/schedules.h"
#include "tests/gpipe/generated_case.h"

namespace gpipe {
namespace {

constexpr std::int64_t kWide = 64;  // enough for a split backward to leave products to W

Use draw_use(std::mt19937_64& random, Unit::Role role, int flags_left_out, int pair = 0) {
  for (;;) {
    const auto& unit = units()[draw(random, 0, static_cast<int>(units().size()) - 1)];
    if (unit.role != role || (unit.flags & flags_left_out)) continue;
    return {&unit, draw(random, 0, kVariants - 1), pair};
  }
}

/// Draws a schedule and a placement that fits it.
void draw_pipeline(std::mt19937_64& random, Spec& spec) {
  const auto rules = schedule_rules();
  const int count = static_cast<int>(rules.size());
  const int rule = draw(random, 0, 2) == 0 ? -1 : draw(random, 0, count);
  if (rule >= 0) spec.schedule = rule < count ? rules[rule].name : kLists;
  for (bool fits = false; !fits;) {
    spec.workers = draw(random, 1, 4);
    const int stages = spec.workers * std::max(1, draw(random, -1, 3));
    spec.placement = draw(random, 0, 2) == 0 && stages == 2 * spec.workers ? v_placement(stages)
                                                                           : looped_placement(spec.workers, stages);
    if (draw(random, 0, 1) == 0) std::shuffle(spec.placement.begin(), spec.placement.end(), random);
    fits = rule < 0 || rule == count ||
           (rules[rule].misfit({stages, 1, spec.placement}).empty() &&
            too_few_stages(spec.schedule, spec.placement).empty());
  }
}

/// Cuts stages into segments with checkpoint modes of their own, if the schedule still fits.
void draw_segments(std::mt19937_64& random, Spec& spec) {
  std::vector<int> placement;
  std::vector<Checkpoint> modes;
  for (const int worker : spec.placement) {
    for (int count = draw(random, 1, 2); count > 0; --count) {
      placement.push_back(worker);
      const int mode = draw(random, 0, static_cast<int>(std::size(kModes)));
      modes.push_back(mode < std::ssize(kModes) ? kModes[mode] : Checkpoint::in_flight(draw(random, 1, 3)));
    }
  }
  const Layout layout{static_cast<int>(placement.size()), 1, placement};
  const bool is_named = !spec.schedule.empty() && spec.schedule != kLists;
  if (is_named && !schedule_rule(spec.schedule).misfit(layout).empty()) return;
  spec.placement = placement;
  spec.checkpoint = modes;
}

}  // namespace

bool Spec::splits() const {
  if (schedule.empty()) return false;
  if (schedule == kLists) return true;
  const auto lists = schedule_rule(schedule).generate({stages(), 1, placement});
  return std::ranges::any_of(lists,
                             [](const auto& list) { return std::ranges::count(list, Kind::I, &Action::kind) > 0; });
}

bool Spec::has(int flags) const {
  return std::ranges::any_of(uses, [&](const Use& use) { return use.unit->flags & flags; });
}

bool Spec::may_be_refused() const {
  const bool is_read_twice = std::ranges::count(uses, Unit::kPeek, [](const Use& use) { return use.unit->role; }) > 0;
  return has(Unit::kChanges) && (has(Unit::kAliases) || is_read_twice);
}

Sequential build(const Spec& spec) {
  torch::manual_seed(spec.seed);
  Builder builder(spec.width);
  if (spec.several_inputs) {
    auto table = builder.module(torch::nn::Embedding(5, spec.width));
    builder.add([table](std::tuple<Tensor, Tensor> in) mutable { return std::get<0>(in) + table(std::get<1>(in)); });
  }
  for (const auto& [unit, variant, pair] : spec.uses) {
    builder.variant = variant;
    builder.pair = "pair" + std::to_string(pair);
    unit->build(builder);
  }
  if (spec.several_outputs) {
    builder.add([](Tensor x) { return std::make_tuple(x, x * 2, x.detach(), x.detach().to(torch::kLong), x.sum(1)); });
  }
  for (std::size_t l = 0; l < builder.model->size(); ++l) {
    if (!(spec.frozen >> l % 3 & 1)) continue;
    for (auto& parameter : builder.model->ptr(l)->parameters()) parameter.requires_grad_(false);
  }
  return builder.model;
}

std::string to_string(const Spec& spec) {
  std::ostringstream text;
  text << "seed " << spec.seed << ", width " << spec.width << ", batch " << spec.batch << ", " << spec.chunks
       << " chunks, stages on workers " << ::testing::PrintToString(spec.placement) << ", checkpoint "
       << to_string(spec.checkpoint) << ", " << (spec.schedule.empty() ? "forward" : spec.schedule) << ", "
       << spec.calls << " calls";
  if (spec.frozen != 0) text << ", frozen " << spec.frozen;
  for (const auto& [name, feature] : kSwitches) text << (spec.*feature ? std::string(", ") + name : "");
  text << ":";
  for (const auto& use : spec.uses) text << " [" << use.unit->name << " " << use.variant << " " << use.pair << "]";
  return text.str();
}

Spec generate(std::uint64_t seed, bool portable) {
  std::mt19937_64 random(seed);
  Spec spec{.seed = seed};
  draw_pipeline(random, spec);
  const auto one_in = [&](int count) { return draw(random, 0, count - 1) == 0; };
  if (spec.splits() && one_in(2)) spec.width = kWide;
  spec.single = !portable && one_in(3);
  const int left_out = (portable ? Unit::kAliases | Unit::kHost : 0) | (spec.single ? Unit::kDouble : 0);
  // The checked device takes the micro-batches of an input for one tensor. So a linear layer comes before units that
  // may write to it.
  if (portable) spec.uses.push_back({&units().front()});
  for (int left = draw(random, 1, 6); left > 0; --left) {
    spec.uses.push_back(draw_use(random, Unit::kWhole, left_out));
  }
  if (one_in(4)) {  // only this unit tells how long cells live
    const auto live = std::ranges::find(units(), std::string_view("live graphs"), &Unit::name);
    spec.uses.insert(spec.uses.begin() + draw(random, portable ? 1 : 0, static_cast<int>(spec.uses.size())), {&*live});
  }
  const auto insert_pair = [&](Unit::Role from, Unit::Role to, int pair) {
    const int first = draw(random, portable ? 1 : 0, static_cast<int>(spec.uses.size()));
    spec.uses.insert(spec.uses.begin() + first, draw_use(random, from, left_out, pair));
    const int second = draw(random, first + 1, static_cast<int>(spec.uses.size()));
    spec.uses.insert(spec.uses.begin() + second, draw_use(random, to, left_out, pair));
    return std::pair(first, second);
  };
  for (int pair = draw(random, 0, 3); pair > 0; --pair) {
    const auto [stash, pop] = insert_pair(Unit::kStash, Unit::kPop, pair);
    for (int peeks = std::max(0, draw(random, -3, 3)); peeks > 0; --peeks) {
      spec.uses.insert(spec.uses.begin() + draw(random, stash + 1, pop), draw_use(random, Unit::kPeek, left_out, pair));
    }
  }
  if (one_in(4)) insert_pair(Unit::kStashOdd, Unit::kPopOdd, 4);
  if (!portable && one_in(4)) {
    insert_pair(Unit::kOwnMatrix, Unit::kShareMatrix, 5);
    if (one_in(2)) spec.uses.push_back(draw_use(random, Unit::kShareMatrix, left_out, 5));
  }
  spec.batch = draw(random, 1, 9);
  spec.chunks = draw(random, 1, 5);
  spec.calls = draw(random, 1, 3);
  spec.checkpoint = kModes[draw(random, 0, 2)];
  spec.no_input_gradient = one_in(4);
  spec.several_inputs = one_in(4);
  spec.several_outputs = one_in(4);
  const bool forward = spec.schedule.empty();
  spec.backward_twice = forward && one_in(4);
  spec.eval = forward && one_in(4);
  spec.accumulates = !spec.backward_twice && one_in(4);
  spec.deferred = !portable && !spec.eval && one_in(4);
  spec.scaled = !forward && seed % 4 == 0;
  if (!portable) {
    std::mt19937_64 more(seed + 1);
    const auto one_in_four = [&] { return draw(more, 0, 3) == 0; };
    spec.autocast = spec.single && draw(more, 0, 1) == 0;
    spec.factories = one_in_four();
    spec.computes_loss = !forward && !spec.accumulates && one_in_four();
    spec.switches = forward && one_in_four();
    spec.threads = one_in_four();
  }
  std::mt19937_64 of_segments(~seed);
  if (draw(of_segments, 0, 2) == 0) draw_segments(of_segments, spec);
  spec.frozen = draw(of_segments, 0, 3) == 0 ? draw(of_segments, 1, 7) : 0;
  // Each stage has a layer.
  while (build(spec)->size() < spec.placement.size()) {
    spec.uses.push_back(draw_use(random, Unit::kWhole, left_out));
  }
  if (spec.has(Unit::kOnce)) spec.checkpoint = Checkpoint::kNever;
  if (spec.has(Unit::kBackward)) spec.backward_twice = false;
  return spec;
}

std::vector<std::string> features(const Spec& spec) {
  std::vector<std::string> features;
  for (const auto& use : spec.uses) features.emplace_back(use.unit->name);
  features.push_back(std::to_string(spec.workers) + " workers");
  const bool has_segments = std::ranges::adjacent_find(spec.placement) != spec.placement.end();
  features.push_back(has_segments ? "segments" : std::to_string(spec.stages() / spec.workers) + " stages per worker");
  features.push_back(spec.schedule.empty() ? "forward" : spec.schedule);
  for (const auto mode : spec.checkpoint.modes) {
    const bool has_name = checkpoints().contains(to_string(mode));
    features.push_back("checkpoint " + (has_name ? to_string(mode) : "of those in flight"));
  }
  for (const auto& [name, feature] : kSwitches) {
    if (spec.*feature) features.emplace_back(name);
  }
  return features;
}

const std::size_t kFeatures =
    units().size() + 4 + 3 + 1 + 1 + schedule_rules().size() + 1 + std::size(kModes) + 1 + std::size(kSwitches);

namespace {

/// The simpler cases to try in place of one that fails.
std::vector<Spec> smaller(const Spec& spec) {
  std::vector<Spec> candidates;
  const auto change = [&](auto Spec::*member, auto value) {
    candidates.push_back(spec);
    candidates.back().*member = std::move(value);
  };
  for (std::size_t out = 0; out < spec.uses.size(); ++out) {
    auto rest = spec.uses;
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(out));
    std::erase_if(rest, [pair = spec.uses[out].pair](const Use& use) { return pair != 0 && use.pair == pair; });
    change(&Spec::uses, rest);
  }
  for (auto number : {&Spec::batch, &Spec::chunks, &Spec::calls}) {
    if (spec.*number > 1) change(number, spec.*number - 1);
  }
  for (const auto& [name, feature] : kSwitches) {
    if (spec.*feature) change(feature, false);
  }
  if (spec.frozen != 0) change(&Spec::frozen, 0);
  if (!spec.schedule.empty()) change(&Spec::schedule, std::string());
  for (const auto mode : kModes) {
    if (spec.checkpoint.modes.size() > 1) change(&Spec::checkpoint, Checkpoints(mode));
  }
  // The last stage leaves, if another one is on its worker.
  auto placement = spec.placement;
  const int last = placement.back();
  placement.pop_back();
  const bool shared = std::ranges::count(placement, last) > 0;
  if (spec.schedule.empty() && !placement.empty() && (shared || last == spec.workers - 1)) {
    change(&Spec::placement, placement);
    if (!shared) --candidates.back().workers;
    if (spec.checkpoint.modes.size() > 1) candidates.back().checkpoint.modes.pop_back();
  }
  std::erase_if(candidates, [](const Spec& candidate) {
    return candidate.uses.empty() || build(candidate)->size() < candidate.placement.size();
  });
  return candidates;
}

}  // namespace

void expect_no_fault(const Seeds& seeds, bool portable, const std::function<std::string(const Spec&)>& fault_of) {
  const absl::Cleanup put_back = [before = torch::get_num_threads()] { torch::set_num_threads(before); };
  torch::set_num_threads(1);
  const auto fails = [&](const Spec& spec) { return !fault_of(spec).empty(); };
  int failures = 0;
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count && failures < 3; ++seed) {
    const auto spec = generate(seed, portable);
    if (!fails(spec)) continue;
    ++failures;
    auto small = spec;
    for (bool shrunk = true; shrunk;) {  // takes the first smaller case that fails too, until none does
      const auto candidates = smaller(small);
      const auto found = std::ranges::find_if(candidates, fails);
      shrunk = found != candidates.end();
      if (shrunk) small = *found;
    }
    ADD_FAILURE() << fault_of(small) << "\n  " << to_string(small) << "\n  shrunk from " << to_string(spec);
  }
}

}  // namespace gpipe
