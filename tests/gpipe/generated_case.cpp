#include "tests/gpipe/generated_case.h"

#include <algorithm>
#include <initializer_list>
#include <random>
#include <sstream>

#include "gpipe/ranks.h"
#include "gpipe/ranks/wire_plan.h"
#include "gpipe/run/micro_batch.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedules.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"
#include "tests/gpipe/random_cases.h"
#include "tests/gpipe/reference.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kWide = 64;  // enough for a split backward to leave products to W
constexpr std::int64_t kNarrow = 6;

/// Adds a tensor of integers.
std::tuple<Tensor, Tensor> with_ids(Tensor x) { return {x, (x.detach().select(1, 0) > 0).to(torch::kLong)}; }

struct ConvolveImpl : nn::Module {
  ConvolveImpl() : conv(register_module("conv", nn::Conv1d(nn::Conv1dOptions(1, 1, 3).padding(1)))) {}
  Tensor forward(Tensor x) { return conv(x.unsqueeze(1)).squeeze(1); }
  nn::Conv1d conv;
};
TORCH_MODULE(Convolve);

constexpr const char* kNames[] = {"linear", "norm",        "dropout",   "in-place dropout", "in-place relu",
                                  "tanh",   "live graphs", "conv",      "nested",           "several tensors",
                                  "stash",  "pop",         "stash odd", "pop odd"};

constexpr const char* kSchedules[] = {"",      "gpipe",     "1f1b", "looped_bfs",     "interleaved_1f1b",
                                      "zb_h1", "zb_h2",     "zb_v", "interleaved_zb", "v_half",
                                      "v_min", "dualpipe_v"};

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}
bool needs_one_stage_per_worker(const Spec& spec) { return is_one_of(spec.schedule, {"1f1b", "zb_h1", "zb_h2"}); }
bool needs_v(const Spec& spec) { return is_one_of(spec.schedule, {"zb_v", "v_half", "v_min", "dualpipe_v"}); }
bool splits(const Spec& spec) {
  return is_one_of(spec.schedule, {"zb_h1", "zb_h2", "zb_v", "interleaved_zb", "v_half", "v_min", "dualpipe_v"});
}
std::int64_t width_of(const Spec& spec) { return spec.wide ? kWide : kNarrow; }

/// Whether the unit's output is saved for a backward, so that no in-place operation may follow.
bool saves_output(UnitKind kind) {
  return kind == UnitKind::kTanh || kind == UnitKind::kPeak || kind == UnitKind::kInPlaceRelu ||
         kind == UnitKind::kStashOdd;
}
bool in_place(UnitKind kind) { return kind == UnitKind::kInPlaceRelu || kind == UnitKind::kInPlaceDropout; }

/// Whether the units make a valid model. A shrunk case may have lost a unit that another one needs.
bool makes_sense(const Spec& spec) {
  const auto sizes = micro_batch_sizes(spec.batch, spec.chunks, 0);
  for (std::size_t i = 0; i < spec.units.size(); ++i) {
    const auto kind = spec.units[i].kind;
    if (in_place(kind) && (i == 0 || saves_output(spec.units[i - 1].kind))) return false;
    if (kind == UnitKind::kNorm && sizes.back() < 2) return false;
  }
  if (needs_one_stage_per_worker(spec) && spec.loops != 1) return false;
  if (is_one_of(spec.schedule, {"interleaved_1f1b", "interleaved_zb"}) && spec.loops == 1) return false;
  if (needs_v(spec) && spec.loops != 2) return false;
  if (spec.wide && !splits(spec)) return false;
  return static_cast<int>(spec.units.size()) >= spec.loops && spec.units.front().kind == UnitKind::kLinear;
}

Sequential build(const Spec& spec) {
  const auto width = width_of(spec);
  Sequential model;
  for (const auto& [kind, skip] : spec.units) {
    switch (kind) {
      case UnitKind::kLinear:
        model->push_back(Linear(width, width));
        break;
      case UnitKind::kNorm:
        model->push_back(nn::BatchNorm1d(width));
        break;
      case UnitKind::kDropout:
      case UnitKind::kInPlaceDropout:
        model->push_back(nn::Dropout(nn::DropoutOptions(0.3).inplace(kind == UnitKind::kInPlaceDropout)));
        break;
      case UnitKind::kInPlaceRelu:
        model->push_back(nn::ReLU(nn::ReLUOptions(true)));
        break;
      case UnitKind::kTanh:
        model->push_back(nn::Tanh());
        break;
      case UnitKind::kPeak:
        model->push_back(Peak());
        break;
      case UnitKind::kConvolve:
        model->push_back(Convolve());
        break;
      case UnitKind::kNested:
        model->push_back(NestedSequential({{"inner", Linear(width, width)}, {"drop", nn::Dropout(0.2)}}));
        break;
      case UnitKind::kSeveralTensors:
        model->push_back(function_layer(with_ids));
        model->push_back(Embed(width));
        model->push_back(InPlace());
        model->push_back(Mix(width));
        model->push_back(Unmix());
        break;
      case UnitKind::kStash:
        model->push_back(Stash(std::to_string(skip)));
        break;
      case UnitKind::kPop:
        model->push_back(Pop(std::to_string(skip)));
        break;
      case UnitKind::kStashOdd:
        model->push_back(StashOdd());
        break;
      case UnitKind::kPopOdd:
        model->push_back(PopOdd());
        break;
    }
  }
  return model;
}

int workers_of(const Spec& spec, const Sequential& model) {
  return std::min(spec.workers, static_cast<int>(model->size()) / spec.loops);
}

/// Equal up to the tolerance, or both undefined; equal also where both are NaN.
bool same_or_nan(const Tensor& a, const Tensor& b, double tolerance) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() &&
         torch::allclose(a.cpu(), b.cpu(), tolerance, tolerance, /*equal_nan=*/true);
}

/// Whether each stage held as many graphs at once as the verifier says, and holds none now.
bool live_graphs_as_verified(const Sequential& model, const GPipe& pipe, const Spec& spec, int micro_batches) {
  const auto here = pipe->modules();
  const auto program = pipe->program(micro_batches);
  const auto& layout = program->layout();
  const auto schedule = spec.schedule.empty() ? fill_drain(layout, spec.checkpoint) : program->schedule();
  const auto peaks = verify(layout, program->edges(), schedule);
  std::size_t layer = 0;
  for (std::size_t stage = 0; stage < pipe->balance().size(); ++stage) {
    for (auto left = pipe->balance()[stage]; left > 0; --left) {
      const auto module = model->ptr(layer++);
      const auto* peak = module->as<PeakImpl>();
      if (!peak || std::find(here.begin(), here.end(), module) == here.end()) continue;
      const int live = peak->live->peak;
      const int verified = peaks.graphs[stage];
      // An I may free the layer's part of the graph before the W.
      if ((splits(spec) ? live > verified : live != verified) || peak->live->now != 0) return false;
    }
  }
  return true;
}

struct Run {
  Tensor output;
  std::vector<Tensor> gradients;  // of x and the parameters
};

/// A training step whose output has the given gradient: by forward() and autograd::grad, or by step().
Run run(const Sequential& model, GPipe& pipe, const Spec& spec, const Tensor& x, const Tensor& gradient) {
  auto wanted = model->parameters();
  wanted.insert(wanted.begin(), x);
  if (spec.schedule.empty()) {
    const auto output = pipe->forward(x);
    return {output.detach(),
            torch::autograd::grad({output}, wanted, {gradient.to(output.device())}, false, false, true)};
  }
  const auto product = tensor_loss([](const Tensor& out, const Tensor& t) { return (out * t).sum(); });
  const auto options = StepOptions().reduction(Reduction::kSum).return_output(true);
  Run run{pipe->step(x, gradient, product, options).output.tensor(), {}};
  for (auto& tensor : wanted) run.gradients.push_back(tensor.grad());
  return run;
}

Order order_of(const Spec& spec) {
  return is_one_of(spec.schedule, {"", "gpipe", "looped_bfs"}) ? Order::kDescending : Order::kAscending;
}

/// Options for the stages of `workers` workers. Schedules that run on any placement get one at random.
GPipeOptions options_for(const Spec& spec, int workers) {
  auto options = GPipeOptions().chunks(spec.chunks).checkpoint(spec.checkpoint).intraop_threads(1);
  options.schedule(spec.schedule.empty() ? "gpipe" : spec.schedule);
  if (needs_v(spec)) return options;
  if (options.schedule() != "gpipe") return options.stages_per_worker(spec.loops);
  auto placement = looped_placement(workers, workers * spec.loops);
  std::mt19937_64 random(spec.seed + 2);
  std::shuffle(placement.begin(), placement.end(), random);
  return options.placement(placement);
}

}  // namespace

std::string to_string(const Spec& spec) {
  std::ostringstream text;
  text << "seed " << spec.seed << ", " << spec.workers << " workers, " << spec.loops << " stages each, batch "
       << spec.batch << ", " << spec.chunks << " chunks, checkpoint " << static_cast<int>(spec.checkpoint) << ", "
       << (spec.schedule.empty() ? "forward" : spec.schedule) << (spec.wide ? ", wide" : "") << ":";
  for (const auto& unit : spec.units) text << " [" << kNames[static_cast<int>(unit.kind)] << " " << unit.skip << "]";
  return text.str();
}

Spec generate(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Spec spec;
  do {
    spec = {seed,
            {{UnitKind::kLinear}},
            draw(random, 1, 4),
            std::max(1, draw(random, -1, 3)),
            draw(random, 1, 9),
            draw(random, 1, 5),
            static_cast<Checkpoint>(draw(random, 0, 2)),
            kSchedules[draw(random, 0, static_cast<int>(std::size(kSchedules)) - 1)],
            draw(random, 0, 1) == 1};
    for (int left = draw(random, 1, 7); left > 0; --left) {
      spec.units.push_back({static_cast<UnitKind>(draw(random, 0, static_cast<int>(UnitKind::kSeveralTensors)))});
    }
    const auto insert_pair = [&](UnitKind from, UnitKind to, int skip) {
      const int first = draw(random, 1, static_cast<int>(spec.units.size()));
      spec.units.insert(spec.units.begin() + first, {from, skip});
      const int second = draw(random, first + 1, static_cast<int>(spec.units.size()));
      spec.units.insert(spec.units.begin() + second, {to, skip});
    };
    for (int skip = draw(random, 0, 3); skip > 0; --skip) insert_pair(UnitKind::kStash, UnitKind::kPop, skip);
    if (draw(random, 0, 3) == 0) insert_pair(UnitKind::kStashOdd, UnitKind::kPopOdd, 0);
  } while (!makes_sense(spec));
  return spec;
}

int workers_of(const Spec& spec) { return workers_of(spec, build(spec)); }

std::string difference(const Spec& spec, const std::optional<Devices>& devices,
                       const std::shared_ptr<Ranks>& ranks) try {
  torch::manual_seed(spec.seed);
  auto model = build(spec);
  const int workers = workers_of(spec, model);
  const auto balance = draw_balance(spec.seed + 1, workers * spec.loops, model->size());
  auto options = options_for(spec, workers);
  if (devices) options.devices({devices->workers.begin(), devices->workers.begin() + workers});
  options.ranks(ranks);
  GPipe pipe(model, balance, options);
  auto x = torch::randn({spec.batch, width_of(spec)});
  if (devices) x = x.to(devices->input);
  x.requires_grad_();
  const auto sizes = micro_batch_sizes(spec.batch, spec.chunks, 0);
  const auto buffers = model->buffers();
  const auto before = copies(buffers);

  auto gradient = torch::ones({spec.batch, width_of(spec)}).cumsum(0);
  if (devices) gradient = gradient.to(devices->target);
  torch::manual_seed(spec.seed);
  const auto [output, got] = run(model, pipe, spec, x, gradient);
  if (!live_graphs_as_verified(model, pipe, spec, static_cast<int>(sizes.size()))) return "the live graphs";
  const auto after = copies(buffers);
  for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(before[i]);

  if (devices) {
    model->to(devices->reference);
    x = x.detach().to(devices->reference).requires_grad_();
    gradient = gradient.to(devices->reference);
  }
  torch::manual_seed(spec.seed);
  const auto expected = reference(model, balance, Value(x), sizes, {gradient}, order_of(spec));
  const double tolerance = !devices ? 0 : spec.wide ? 1e-3 : 1e-4;  // wide sums have ten times the terms
  const auto same = [&](const Tensor& a, const Tensor& b) { return same_or_nan(a, b, tolerance); };
  if (!same(output, expected.outputs[0])) return "the output";
  const int first = pipe->placement().front();
  const bool has_input = !ranks || ranks_of_workers(workers, ranks->size())[first] == ranks->rank();
  if (!same(got[0], has_input ? expected.input_gradients[0] : Tensor())) return "the gradient of the input";
  const auto is_here = [](const std::vector<Tensor>& tensors, const Tensor& tensor) {
    return std::any_of(tensors.begin(), tensors.end(), [&](const Tensor& other) { return other.is_same(tensor); });
  };
  const auto parameters = model->parameters();
  for (std::size_t p = 0; p < expected.parameter_gradients.size(); ++p) {
    const bool here = is_here(pipe->parameters(), parameters[p]);
    if (!same(got[p + 1], here ? expected.parameter_gradients[p] : Tensor())) {
      return "the gradient of parameter " + std::to_string(p);
    }
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (is_here(pipe->buffers(), buffers[i]) && !same(buffers[i], after[i])) return "buffer " + std::to_string(i);
  }
  return "";
} catch (const c10::Error& error) {
  return error.what_without_backtrace();
} catch (const std::exception& error) {
  return error.what();
}

std::vector<std::string> features(const Spec& spec) {
  std::vector<std::string> features;
  for (const auto& unit : spec.units) features.emplace_back(kNames[static_cast<int>(unit.kind)]);
  features.push_back(std::to_string(spec.workers) + " workers");
  features.push_back(std::to_string(spec.loops) + " stages per worker");
  features.push_back(spec.schedule.empty() ? "forward" : spec.schedule);
  if (spec.wide) features.emplace_back("wide");
  features.push_back("checkpoint " + std::to_string(static_cast<int>(spec.checkpoint)));
  return features;
}

const std::size_t kFeatures = std::size(kNames) + std::size(kSchedules) + 4 + 3 + 3 + 1;

std::vector<Spec> smaller(const Spec& spec) {
  std::vector<Spec> candidates;
  const auto belong = [](const Unit& unit, const Unit& out) {
    return out.kind >= UnitKind::kStash && unit.kind >= UnitKind::kStash && unit.skip == out.skip;
  };
  for (auto& units : each_left_out(spec.units, belong)) {
    candidates.push_back(spec);
    candidates.back().units = std::move(units);
  }
  for (auto number : {&Spec::batch, &Spec::chunks, &Spec::workers, &Spec::loops}) {
    if (spec.*number == 1) continue;
    candidates.push_back(spec);
    --(candidates.back().*number);
  }
  std::erase_if(candidates, [](const Spec& candidate) { return !makes_sense(candidate); });
  return candidates;
}

}  // namespace gpipe
