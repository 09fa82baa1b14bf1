// Transparency over generated cases: a random model, cut, micro-batching and checkpoint mode against the reference.
//   GPIPE_GENERATED_CASES=50000 GPIPE_GENERATED_SEED=7 gpipe_tests --gtest_filter='Generated*'
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <string>

#include "gpipe/micro_batch.h"
#include "gpipe/schedule/verifier.h"
#include "tests/gpipe/layers.h"
#include "tests/gpipe/reference.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kWidth = 6;

struct ForkImpl : nn::Module {
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x) {
    return {x, (x.detach().select(1, 0) > 0).to(torch::kLong)};
  }
};
TORCH_MODULE(Fork);

struct ConvolveImpl : nn::Module {
  ConvolveImpl() : conv(register_module("conv", nn::Conv1d(nn::Conv1dOptions(1, 1, 3).padding(1)))) {}
  torch::Tensor forward(torch::Tensor x) { return conv(x.unsqueeze(1)).squeeze(1); }
  nn::Conv1d conv;
};
TORCH_MODULE(Convolve);

enum class Kind {
  kLinear,
  kNorm,
  kDropout,
  kInPlaceDropout,
  kInPlaceRelu,
  kTanh,
  kPeak,  // counts the graphs that are alive
  kConvolve,
  kNested,
  kSeveralTensors,  // five layers, with integers, in-place operations and a tensor returned twice
  kStash,
  kPop,
  kStashOdd,  // integers, an undefined tensor, and one that is not used
  kPopOdd,
};
constexpr const char* kNames[] = {"linear", "norm",        "dropout",   "in-place dropout", "in-place relu",
                                  "tanh",   "live graphs", "conv",      "nested",           "several tensors",
                                  "stash",  "pop",         "stash odd", "pop odd"};

struct Unit {
  Kind kind;
  int skip = 0;  // of a stash or pop: which
};

struct Spec {
  std::uint64_t seed = 0;
  std::vector<Unit> units;
  int stages = 1;
  std::int64_t batch = 1;
  std::int64_t chunks = 1;
  Checkpoint checkpoint = Checkpoint::kNever;
  int loops = 1;         // stages per worker; stages is a multiple of it
  std::string schedule;  // of step(); empty: forward() and backward
};

std::string to_string(const Spec& spec) {
  std::ostringstream text;
  text << "seed " << spec.seed << ", " << spec.stages << " stages, batch " << spec.batch << ", " << spec.chunks
       << " chunks, checkpoint " << static_cast<int>(spec.checkpoint) << ", " << spec.loops << " stages per worker, "
       << (spec.schedule.empty() ? "forward" : spec.schedule) << ":";
  for (const auto& unit : spec.units) text << " [" << kNames[static_cast<int>(unit.kind)] << " " << unit.skip << "]";
  return text.str();
}

int draw(std::mt19937_64& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
}

// In-place operations may not follow what saves its own output for the backward, or passes on what did.
bool saves_output(Kind kind) {
  return kind == Kind::kTanh || kind == Kind::kPeak || kind == Kind::kInPlaceRelu || kind == Kind::kStashOdd;
}
bool in_place(Kind kind) { return kind == Kind::kInPlaceRelu || kind == Kind::kInPlaceDropout; }

// Whether the units make a model: what a shrunk case may have lost.
bool makes_sense(const Spec& spec) {
  const auto sizes = micro_batch_sizes(spec.batch, spec.chunks, 0);
  for (std::size_t i = 0; i < spec.units.size(); ++i) {
    const auto kind = spec.units[i].kind;
    if (in_place(kind) && (i == 0 || saves_output(spec.units[i - 1].kind))) return false;
    if (kind == Kind::kNorm && sizes.back() < 2) return false;
  }
  return static_cast<int>(spec.units.size()) >= spec.loops && spec.units.front().kind == Kind::kLinear;
}

Spec generate(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Spec spec;
  do {
    spec = {seed,
            {{Kind::kLinear}},
            draw(random, 1, 6),
            draw(random, 1, 9),
            draw(random, 1, 5),
            static_cast<Checkpoint>(draw(random, 0, 2))};
    spec.loops = draw(random, 1, 3);
    spec.stages = std::max(1, spec.stages / spec.loops) * spec.loops;
    const std::vector<std::string> schedules = {"", "gpipe", "looped_bfs", "interleaved_1f1b", "1f1b"};
    spec.schedule = schedules[draw(random, 0, spec.loops == 1 ? 4 : 3)];
    for (int left = draw(random, 1, 7); left > 0; --left) {
      spec.units.push_back({static_cast<Kind>(draw(random, 0, static_cast<int>(Kind::kSeveralTensors)))});
    }
    const auto insert_pair = [&](Kind from, Kind to, int skip) {
      const int first = draw(random, 1, static_cast<int>(spec.units.size()));
      spec.units.insert(spec.units.begin() + first, {from, skip});
      const int second = draw(random, first + 1, static_cast<int>(spec.units.size()));
      spec.units.insert(spec.units.begin() + second, {to, skip});
    };
    for (int skip = draw(random, 0, 3); skip > 0; --skip) insert_pair(Kind::kStash, Kind::kPop, skip);
    if (draw(random, 0, 3) == 0) insert_pair(Kind::kStashOdd, Kind::kPopOdd, 0);
  } while (!makes_sense(spec));
  return spec;
}

nn::Sequential build(const Spec& spec) {
  nn::Sequential model;
  for (const auto& [kind, skip] : spec.units) {
    switch (kind) {
      case Kind::kLinear:
        model->push_back(nn::Linear(kWidth, kWidth));
        break;
      case Kind::kNorm:
        model->push_back(nn::BatchNorm1d(kWidth));
        break;
      case Kind::kDropout:
      case Kind::kInPlaceDropout:
        model->push_back(nn::Dropout(nn::DropoutOptions(0.3).inplace(kind == Kind::kInPlaceDropout)));
        break;
      case Kind::kInPlaceRelu:
        model->push_back(nn::ReLU(nn::ReLUOptions(true)));
        break;
      case Kind::kTanh:
        model->push_back(nn::Tanh());
        break;
      case Kind::kPeak:
        model->push_back(Peak());
        break;
      case Kind::kConvolve:
        model->push_back(Convolve());
        break;
      case Kind::kNested:
        model->push_back(NestedSequential({{"inner", nn::Linear(kWidth, kWidth)}, {"drop", nn::Dropout(0.2)}}));
        break;
      case Kind::kSeveralTensors:
        model->push_back(Fork());
        model->push_back(Embed());
        model->push_back(InPlace());
        model->push_back(Mix());
        model->push_back(Unmix());
        break;
      case Kind::kStash:
        model->push_back(Stash(std::to_string(skip)));
        break;
      case Kind::kPop:
        model->push_back(Pop(std::to_string(skip)));
        break;
      case Kind::kStashOdd:
        model->push_back(StashOdd());
        break;
      case Kind::kPopOdd:
        model->push_back(PopOdd());
        break;
    }
  }
  return model;
}

std::vector<std::int64_t> cut(const Spec& spec, std::int64_t layers) {
  std::mt19937_64 random(spec.seed + 1);
  const int most = static_cast<int>(layers) / spec.loops * spec.loops;
  const int stages = std::min(spec.stages, most);
  std::vector<std::int64_t> balance(stages, 1);
  for (std::int64_t left = layers - stages; left > 0; --left) ++balance[draw(random, 0, stages - 1)];
  return balance;
}

bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || torch::allclose(a, b, 0, 0, /*equal_nan=*/true));
}

// Whether each stage has held as many graphs at once as the verifier says, and holds none now.
bool live_graphs_as_verified(const nn::Sequential& model, const GPipe& pipe, const Spec& spec,
                             std::size_t micro_batches) {
  const auto program = pipe->program(static_cast<int>(micro_batches));
  const auto& layout = program->layout();
  const auto schedule = spec.schedule.empty() ? fill_drain(layout, spec.checkpoint) : program->schedule();
  const auto peaks = verify(layout, program->edges(), schedule);
  std::size_t layer = 0;
  for (std::size_t stage = 0; stage < pipe->balance().size(); ++stage) {
    for (auto left = pipe->balance()[stage]; left > 0; --left) {
      const auto* peak = model->ptr(layer++)->as<PeakImpl>();
      if (peak && (peak->live->peak != peaks->graphs[stage] || peak->live->now != 0)) return false;
    }
  }
  return true;
}

struct Run {
  torch::Tensor output;
  std::vector<torch::Tensor> gradients;  // of x and the parameters
};

// A training step whose output has the given gradient: by forward() and autograd::grad, or by step().
Run run(const nn::Sequential& model, GPipe& pipe, const Spec& spec, const torch::Tensor& x,
        const torch::Tensor& gradient) {
  auto wanted = model->parameters();
  wanted.insert(wanted.begin(), x);
  if (spec.schedule.empty()) {
    const auto output = pipe->forward(x);
    return {output.detach(), torch::autograd::grad({output}, wanted, {gradient}, false, false, true)};
  }
  const auto product = tensor_loss([](const torch::Tensor& out, const torch::Tensor& t) { return (out * t).sum(); });
  const auto options = StepOptions().reduction(Reduction::kSum).return_output(true);
  const auto result = pipe->step(x, gradient, product, options);
  Run run{result.output.tensor(), {}};
  for (auto& tensor : wanted) run.gradients.push_back(tensor.grad());
  return run;
}

Order order_of(const Spec& spec) {
  return spec.schedule == "1f1b" || spec.schedule == "interleaved_1f1b" ? Order::kAscending : Order::kDescending;
}

// What is not as in the reference; empty when all is.
std::string difference(const Spec& spec) try {
  torch::manual_seed(spec.seed);
  auto model = build(spec);
  const auto balance = cut(spec, static_cast<std::int64_t>(model->size()));
  auto options = GPipeOptions().chunks(spec.chunks).checkpoint(spec.checkpoint).intraop_threads(1);
  options.stages_per_worker(spec.loops).schedule(spec.schedule.empty() ? "gpipe" : spec.schedule);
  GPipe pipe(model, balance, options);
  const auto x = torch::randn({spec.batch, kWidth}).requires_grad_();
  const auto sizes = micro_batch_sizes(spec.batch, spec.chunks, 0);
  const auto buffers = model->buffers();
  std::vector<torch::Tensor> before;
  for (const auto& buffer : buffers) before.push_back(buffer.clone());

  const auto gradient = torch::ones({spec.batch, kWidth}).cumsum(0);
  torch::manual_seed(spec.seed);
  const auto [output, got] = run(model, pipe, spec, x, gradient);
  if (!live_graphs_as_verified(model, pipe, spec, sizes.size())) return "the live graphs";
  std::vector<torch::Tensor> after;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    after.push_back(buffers[i].clone());
    buffers[i].copy_(before[i]);
  }

  torch::manual_seed(spec.seed);
  const auto expected = reference(model, balance, Value(x), sizes, {gradient}, order_of(spec));
  if (!same(output, expected.outputs[0])) return "the output";
  if (!same(got[0], expected.input_gradients[0])) return "the gradient of the input";
  for (std::size_t p = 0; p < expected.parameter_gradients.size(); ++p) {
    if (!same(got[p + 1], expected.parameter_gradients[p])) return "the gradient of parameter " + std::to_string(p);
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (!same(buffers[i], after[i])) return "buffer " + std::to_string(i);
  }
  return "";
} catch (const c10::Error& error) {
  return error.what_without_backtrace();
} catch (const std::exception& error) {
  return error.what();
}

// The case without what its failure does not need.
Spec shrink(Spec spec) {
  for (bool shrunk = true; shrunk;) {
    shrunk = false;
    std::vector<Spec> candidates;
    for (std::size_t i = 1; i < spec.units.size(); ++i) {
      auto fewer = spec;
      const auto unit = spec.units[i];
      std::erase_if(fewer.units, [&, index = std::size_t{0}](const Unit& other) mutable {
        const bool is_it = index++ == i;
        return is_it || (unit.kind >= Kind::kStash && other.kind >= Kind::kStash && other.skip == unit.skip);
      });
      candidates.push_back(fewer);
    }
    for (auto part : {&Spec::batch, &Spec::chunks}) {
      candidates.push_back(spec);
      candidates.back().*part = spec.*part - 1;
    }
    candidates.push_back(spec);
    candidates.back().stages -= spec.loops;
    for (const auto& candidate : candidates) {
      if (candidate.stages < 1 || candidate.batch < 1 || candidate.chunks < 1) continue;
      if (!makes_sense(candidate) || difference(candidate).empty()) continue;
      spec = candidate;
      shrunk = true;
      break;
    }
  }
  return spec;
}

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(GeneratedTest, PipelinesEqualTheReferenceBitByBit) {
  const auto cases = from_environment("GPIPE_GENERATED_CASES", 2000);
  const auto first = from_environment("GPIPE_GENERATED_SEED", 1);
  const int threads = torch::get_num_threads();
  torch::set_num_threads(1);
  std::map<std::string, int> seen;
  int failures = 0;
  for (std::uint64_t seed = first; seed < first + cases && failures < 3; ++seed) {
    const auto spec = generate(seed);
    for (const auto& unit : spec.units) ++seen[kNames[static_cast<int>(unit.kind)]];
    ++seen[std::to_string(spec.stages) + " stages"];
    ++seen[std::to_string(spec.loops) + " stages per worker"];
    ++seen[spec.schedule.empty() ? "forward" : spec.schedule];
    ++seen["checkpoint " + std::to_string(static_cast<int>(spec.checkpoint))];
    if (difference(spec).empty()) continue;
    ++failures;
    const auto small = shrink(spec);
    ADD_FAILURE() << difference(small) << "\n  " << to_string(small) << "\n  shrunk from " << to_string(spec);
  }
  torch::set_num_threads(threads);
  std::cout << cases << " cases from seed " << first << ":";
  for (const auto& [feature, count] : seen) std::cout << " " << feature << " " << count << ",";
  std::cout << std::endl;
  if (cases >= 2000) EXPECT_EQ(seen.size(), std::size(kNames) + 6 + 3 + 3 + 5) << "some feature never occurred";
}

}  // namespace
}  // namespace gpipe
