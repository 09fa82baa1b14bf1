// Pipelines compared with the bare model: a plain loop over the same layers, micro-batch by micro-batch, with PyTorch's
// own autograd. It uses nothing of the library.
//   GPIPE_GENERATED_CASES=50000 GPIPE_GENERATED_SEED=7 gpipe_tests --gtest_filter='Bare*'
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <string>

#include "gpipe/gpipe.h"
#include "tests/gpipe/bare_units.h"
#include "tests/gpipe/random_cases.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
using bare::Builder;
using bare::kWidth;
using bare::PlainSkips;
using bare::Unit;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Role = Unit::Role;

struct Use {
  const Unit* unit;
  int variant = 0;
  int skip = 0;  // the number of the skip, for a stash or pop
};

struct Spec {
  std::uint64_t seed = 0;
  std::vector<Use> uses;
  int stages = 1;
  int batch = 1;
  int chunks = 1;
  int calls = 1;
  Checkpoint checkpoint = Checkpoint::kNever;
  bool input_gradient = true;
  bool several_inputs = false;
  bool several_outputs = false;
  bool backward_twice = false;
  bool eval = false;  // in the second call
};

std::string to_string(const Spec& spec) {
  std::ostringstream text;
  text << "seed " << spec.seed << ", " << spec.stages << " stages, batch " << spec.batch << ", " << spec.chunks
       << " chunks, checkpoint " << static_cast<int>(spec.checkpoint) << ", " << spec.calls << " calls"
       << (spec.input_gradient ? "" : ", no input gradient") << (spec.several_inputs ? ", several inputs" : "")
       << (spec.several_outputs ? ", several outputs" : "") << (spec.backward_twice ? ", backward twice" : "")
       << (spec.eval ? ", eval" : "") << ":";
  for (const auto& use : spec.uses) text << " [" << use.unit->name << " " << use.variant << " " << use.skip << "]";
  return text.str();
}

Use draw_use(std::mt19937_64& random, Role role, int skip = 0) {
  for (;;) {
    const auto& unit = bare::units()[draw(random, 0, static_cast<int>(bare::units().size()) - 1)];
    if (unit.role == role) return {&unit, draw(random, 0, bare::kVariants - 1), skip};
  }
}

Spec generate(std::mt19937_64& random) {
  Spec spec;
  spec.seed = random();
  for (int left = draw(random, 1, 6); left > 0; --left) spec.uses.push_back(draw_use(random, Role::kWhole));
  const auto insert_pair = [&](Role from, Role to, int skip) {
    const int first = draw(random, 0, static_cast<int>(spec.uses.size()));
    spec.uses.insert(spec.uses.begin() + first, draw_use(random, from, skip));
    const int second = draw(random, first + 1, static_cast<int>(spec.uses.size()));
    spec.uses.insert(spec.uses.begin() + second, draw_use(random, to, skip));
  };
  for (int skip = std::max(0, draw(random, -1, 3)); skip > 0; --skip) insert_pair(Role::kStash, Role::kPop, skip);
  if (draw(random, 0, 5) == 0) insert_pair(Role::kStashOdd, Role::kPopOdd, 0);
  spec.stages = draw(random, 1, 5);
  spec.batch = draw(random, 1, 9);
  spec.chunks = draw(random, 1, 5);
  spec.calls = 3;
  spec.checkpoint = static_cast<Checkpoint>(draw(random, 0, 2));
  spec.input_gradient = draw(random, 0, 3) > 0;
  spec.several_inputs = draw(random, 0, 3) == 0;
  spec.several_outputs = draw(random, 0, 3) == 0;
  spec.backward_twice = draw(random, 0, 3) == 0;
  spec.eval = draw(random, 0, 5) == 0;
  return spec;
}

/// Whether the pipeline may refuse the model: it may change a tensor in place that shares memory with another tensor.
bool may_be_refused(const Spec& spec) {
  const auto any = [&](bool Unit::*what) {
    return std::any_of(spec.uses.begin(), spec.uses.end(), [&](const Use& use) { return use.unit->*what; });
  };
  return any(&Unit::in_place) && any(&Unit::shares);
}

nn::Sequential build(const Spec& spec, PlainSkips* plain) {
  torch::manual_seed(spec.seed);
  Builder builder(plain);
  if (spec.several_inputs) {
    auto table = builder.module(nn::Embedding(5, kWidth));
    builder.add([table](std::tuple<Tensor, Tensor> in) mutable { return std::get<0>(in) + table(std::get<1>(in)); });
  }
  for (const auto& [unit, variant, skip] : spec.uses) unit->build(builder, variant, "skip" + std::to_string(skip));
  if (spec.several_outputs) {
    builder.add([](Tensor x) { return std::make_tuple(x, x * 2, x.detach(), x.detach().to(torch::kLong), x.sum(1)); });
  }
  return builder.model();
}

/// The input of a call. A pipeline may overwrite it.
Tensors inputs_of(const Spec& spec, int call) {
  torch::manual_seed(spec.seed + call + 1);
  Tensors inputs = {torch::randn({spec.batch, kWidth})};
  if (spec.several_inputs) inputs.push_back(torch::randint(5, {spec.batch}, torch::kLong));
  inputs[0].requires_grad_(spec.input_gradient);
  return inputs;
}

Tensors forward_bare(nn::Sequential model, const Spec& spec, const Tensors& inputs) {
  const int size = (spec.batch + spec.chunks - 1) / spec.chunks;
  std::vector<Tensors> parts;
  for (int start = 0; start < spec.batch; start += size) {
    const auto part = [&](const Tensor& whole) {
      return whole.narrow(0, start, std::min(size, spec.batch - start)).clone();
    };
    nn::AnyValue value = spec.several_inputs ? nn::AnyValue(std::make_tuple(part(inputs[0]), part(inputs[1])))
                                             : nn::AnyValue(part(inputs[0]));
    for (auto& layer : *model) value = layer.any_forward(std::move(value));
    if (spec.several_outputs) {
      const auto [a, b, c, d, e] = value.get<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>>();
      parts.push_back({a, b, c, d, e});
    } else {
      parts.push_back({value.get<Tensor>()});
    }
  }
  Tensors outputs;
  for (std::size_t k = 0; k < parts.front().size(); ++k) {
    Tensors pieces;
    for (const auto& of_part : parts) pieces.push_back(of_part[k]);
    outputs.push_back(torch::cat(pieces));
  }
  return outputs;
}

Tensors forward_pipeline(GPipe& pipe, const Tensors& inputs) {
  const Value input = inputs.size() == 2 ? Value(std::make_tuple(inputs[0], inputs[1])) : Value(inputs[0]);
  return pipe->forward(input).tensors();
}

/// The results of a call, by name.
using Result = std::vector<std::pair<std::string, Tensor>>;

template <class Forward>
Result call(const nn::Sequential& model, const Spec& spec, int number, Forward forward) {
  const auto inputs = inputs_of(spec, number);
  const auto outputs = forward(inputs);
  Tensors roots;
  Tensors gradients;
  for (const auto& output : outputs) {
    if (!output.requires_grad()) continue;
    roots.push_back(output);
    gradients.push_back(torch::arange(output.numel(), torch::kDouble).sin().view(output.sizes()));
  }
  if (!roots.empty()) {
    // PyTorch may store a view of a given gradient in .grad, and add to it later, so each backward gets a copy.
    const auto given = [&gradients] {
      Tensors clones;
      for (const auto& gradient : gradients) clones.push_back(gradient.clone());
      return clones;
    };
    if (spec.backward_twice) torch::autograd::backward(roots, given(), /*retain_graph=*/true);
    torch::autograd::backward(roots, given());
  }
  Result result;
  const auto add = [&](const std::string& name, const Tensor& tensor) {
    result.emplace_back(name, tensor.defined() ? tensor.detach().to_dense().clone() : tensor);
  };
  for (std::size_t k = 0; k < outputs.size(); ++k) add("output " + std::to_string(k), outputs[k]);
  add("the gradient of the input", inputs[0].grad());
  for (const auto& parameter : model->named_parameters()) {
    add("the gradient of " + parameter.key(), parameter.value().grad());
  }
  torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad().to_dense() * 0.01);
    parameter.mutable_grad().reset();
  }
  for (const auto& parameter : model->named_parameters()) add(parameter.key(), parameter.value());
  for (const auto& buffer : model->named_buffers()) add(buffer.key(), buffer.value());
  return result;
}

bool close(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() && torch::allclose(a, b, 1e-9, 1e-10, /*equal_nan=*/true);
}

/// The name of the first result that differs; empty if there is none.
std::string difference(const Result& got, const Result& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!close(got[i].second, expected[i].second)) return expected[i].first;
  }
  return "";
}

enum class Verdict { kEqual, kDifferent, kRefused, kNoModel };

struct Outcome {
  Verdict verdict;
  std::string what;
};

std::string text_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

Outcome compare(const Spec& spec) {
  std::vector<Result> expected;
  try {
    PlainSkips skips;
    auto model = build(spec, &skips);
    for (int number = 0; number < spec.calls; ++number) {
      model->train(!spec.eval || number != 1);
      expected.push_back(call(model, spec, number, [&](const Tensors& in) { return forward_bare(model, spec, in); }));
    }
  } catch (const std::exception& error) {
    return {Verdict::kNoModel, text_of(error)};  // PyTorch refuses in-place changes of tensors that a backward needs
  }
  try {
    const auto model = build(spec, nullptr);
    GPipe pipe(model, draw_balance(spec.seed + 1, spec.stages, model->size()),
               GPipeOptions().chunks(spec.chunks).checkpoint(spec.checkpoint).intraop_threads(1));
    for (int number = 0; number < spec.calls; ++number) {
      pipe->train(!spec.eval || number != 1);
      const auto got = call(model, spec, number, [&](const Tensors& in) { return forward_pipeline(pipe, in); });
      const auto found = difference(got, expected[number]);
      if (!found.empty()) return {Verdict::kDifferent, found + " of call " + std::to_string(number)};
    }
  } catch (const std::exception& error) {
    const auto text = text_of(error);
    const bool documented =
        text.find("changed in place") != std::string::npos ||
        text.find("was changed in place by one of its layers for the first time") != std::string::npos;
    return {documented && may_be_refused(spec) ? Verdict::kRefused : Verdict::kDifferent, text};
  }
  return {Verdict::kEqual, ""};
}

std::vector<Spec> smaller(const Spec& spec) {
  std::vector<Spec> candidates;
  const auto belong = [](const Use& use, const Use& out) {
    return out.unit->role != Role::kWhole && use.unit->role != Role::kWhole && use.skip == out.skip;
  };
  for (auto& uses : each_left_out(spec.uses, belong)) {
    if (uses.empty()) continue;
    candidates.push_back(spec);
    candidates.back().uses = std::move(uses);
  }
  for (auto number : {&Spec::batch, &Spec::chunks, &Spec::stages, &Spec::calls}) {
    if (spec.*number == 1) continue;
    candidates.push_back(spec);
    --(candidates.back().*number);
  }
  for (auto feature : {&Spec::several_inputs, &Spec::several_outputs, &Spec::backward_twice, &Spec::eval}) {
    if (!(spec.*feature)) continue;
    candidates.push_back(spec);
    candidates.back().*feature = false;
  }
  return candidates;
}

class Bare : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kDouble));
  }
  void TearDown() override {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat));
    torch::set_num_threads(threads_);
  }

 private:
  const int threads_ = torch::get_num_threads();
};

TEST_F(Bare, ModelsEqualPipelines) {
  const auto seeds = seeds_from_environment(500);
  const auto differs = [](const Spec& spec) { return compare(spec).verdict == Verdict::kDifferent; };
  Counts seen;
  std::uint64_t refused = 0;
  int failures = 0;
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count && failures < 3; ++seed) {
    std::mt19937_64 random(seed);
    Spec spec;
    Outcome outcome;
    do {
      spec = generate(random);
      outcome = compare(spec);
    } while (outcome.verdict == Verdict::kNoModel);
    for (const auto& use : spec.uses) ++seen[use.unit->name];
    if (outcome.verdict == Verdict::kRefused) ++refused;
    if (outcome.verdict != Verdict::kDifferent) continue;
    ++failures;
    const auto small = shrink(spec, smaller, differs);
    ADD_FAILURE() << compare(small).what << "\n  " << to_string(small) << "\n  shrunk from " << to_string(spec);
  }
  print(seeds, seen);
  std::cout << refused << " refused" << std::endl;
  EXPECT_LE(refused * 10, seeds.count) << "more than a tenth of the cases are refused";
  if (seeds.count >= 500) EXPECT_EQ(seen.size(), bare::units().size()) << "a unit never occurred";
}

}  // namespace
}  // namespace gpipe
