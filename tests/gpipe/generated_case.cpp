#include "tests/gpipe/generated_case.h"

#include <ATen/autocast_mode.h>

#include <future>

#include "gpipe/mesh.h"
#include "gpipe/ranks.h"
#include "gpipe/run/step_input.h"
#include "gpipe/schedule/list_schedule.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/reference.h"

namespace gpipe {
namespace {

using Tensors = std::vector<Tensor>;

constexpr double kScale = 1024;  // a power of two, which changes no other bits

/// The first sample of a replica, and the one behind its last.
std::pair<std::int64_t, std::int64_t> part_of(const Spec& spec, const Ranks* ranks, int replica) {
  return ranks ? ranks->part(spec.batch, replica) : std::pair<std::int64_t, std::int64_t>(0, spec.batch);
}

/// The results of all calls, by name.
using CaseResults = std::map<std::string, Tensor>;

/// A replica's call on its part of a mini-batch. The tensors are its own.
struct Call {
  Call(const Spec& spec, int number, const std::optional<Devices>& devices, const Ranks* ranks, int replica)
      : number(number) {
    torch::manual_seed(spec.seed + number + 1);
    inputs.push_back(torch::randn({spec.batch, spec.width}));
    if (spec.several_inputs) inputs.push_back(torch::randint(5, {spec.batch}, torch::kLong));
    target = torch::arange(spec.batch, inputs[0].options()).sin().unsqueeze(1);
    const auto [begin, end] = part_of(spec, ranks, replica);
    for (auto& input : inputs) input = input.slice(0, begin, end);
    target = target.slice(0, begin, end);
    if (devices) {
      for (auto& input : inputs) input = input.to(devices->input);
      target = target.to(devices->target);
    }
    inputs[0].requires_grad_(!spec.no_input_gradient);
  }
  Value input() const { return inputs.size() == 2 ? Value(std::make_tuple(inputs[0], inputs[1])) : Value(inputs[0]); }
  std::int64_t samples() const { return target.size(0); }
  const int number;
  Tensors inputs;
  Tensor target;
};

/// Enables autocast on this thread. A cache of casts would join the graphs of two stages.
class Autocast {
 public:
  explicit Autocast(bool enabled) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_cache_enabled(true);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

/// The loss, which draws random numbers.
Tensor weighted_sum(const Value& output, const Value& target) {
  Tensor sum;
  for (const auto& tensor : output.tensors()) {
    if (!tensor.is_floating_point()) continue;
    const auto dropped = torch::dropout(tensor, 0.2, /*train=*/true);
    const auto of_tensor = (dropped.reshape({tensor.size(0), -1}) * target.tensor()).sum();
    sum = sum.defined() ? sum + of_tensor : of_tensor;
  }
  return sum;
}

/// A gradient for each output that requires grad.
Tensors gradients_of(const Tensors& outputs) {
  Tensors gradients;
  for (const auto& output : outputs) {
    const auto gradient = [&] { return torch::arange(output.numel(), output.options()).sin().view(output.sizes()); };
    gradients.push_back(output.requires_grad() ? gradient() : Tensor());
  }
  return gradients;
}

/// Trains a model: makes all calls, each with an optimizer's step after it. `train` returns the outputs of a call, and
/// adds to `.grad`. `is_here` tells whether a parameter or buffer is on this rank, and `has_input` whether the input
/// is; nothing is known of others.
template <class Train, class IsHere>
CaseResults results_of(const Spec& spec, const Sequential& model, const std::optional<Devices>& devices,
                       const Ranks* ranks, Train train, IsHere is_here, bool has_input) {
  CaseResults results;
  for (int number = 0; number < spec.calls; ++number) {
    const auto add = [&](const std::string& name, const Tensor& tensor) {
      const auto dense = [&] { return tensor.is_nested() ? torch::cat(tensor.unbind()) : tensor.to_dense(); };
      results[std::to_string(number) + ": " + name] = tensor.defined() ? dense().detach().clone() : tensor;
    };
    Call call(spec, number, devices, ranks, ranks ? ranks->replica() : 0);
    torch::manual_seed(spec.seed + number + 1);
    const auto outputs = train(call, /*eval=*/spec.eval && number == 1);
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      add("output " + std::to_string(k), outputs[k]);
      add("whether output " + std::to_string(k) + " requires grad", torch::tensor(outputs[k].requires_grad()));
    }
    if (has_input || call.inputs[0].grad().defined()) add("the gradient of the input", call.inputs[0].grad());
    if (!devices) add("the generator", generator_state());
    const torch::NoGradGuard no_grad;
    const auto parameters = model->named_parameters();
    for (const auto& parameter : parameters) {
      const auto& gradient = parameter.value().grad();
      if (is_here(parameter.value()) || gradient.defined()) add("the gradient of " + parameter.key(), gradient);
    }
    for (auto& parameter : spec.accumulates ? Tensors() : distinct_parameters(*model)) {
      // Bounded: where training diverges, a gradient's terms cancel, and rounding errors are all that is left.
      if (parameter.grad().defined()) parameter.sub_(parameter.grad().to_dense().clamp(-1, 1) * 0.01);
      parameter.mutable_grad().reset();
    }
    for (const auto& parameter : parameters) {
      if (is_here(parameter.value())) add(parameter.key(), parameter.value());
    }
    for (const auto& buffer : model->named_buffers()) {
      const auto& key = buffer.key();  // deferred running statistics are of the whole mini-batch
      const bool deferred = spec.deferred && (key.find(".running_") != key.npos || key.ends_with("batches_tracked"));
      if (!deferred && is_here(buffer.value())) add(key, buffer.value());
    }
  }
  return results;
}

/// Draws a cut into a stage for each entry of the placement, or into one per layer if there are fewer layers.
Balance balance_of(const Spec& spec, const Sequential& model) {
  std::mt19937_64 random(spec.seed + 1);
  Balance balance(std::min(spec.placement.size(), model->size()), 1);
  const int last = static_cast<int>(balance.size()) - 1;
  for (auto left = model->size() - balance.size(); left > 0; --left) ++balance[draw(random, 0, last)];
  return balance;
}

std::vector<std::int64_t> sizes_of(const Spec& spec, const Sequential& model, std::int64_t samples) {
  const auto buffers = model->named_buffers();
  const bool has_norm =
      std::ranges::any_of(buffers, [](const auto& buffer) { return buffer.key().ends_with(".num_batches_tracked"); });
  return micro_batch_sizes(samples, spec.chunks, 0, has_norm && model->is_training() ? 2 : 1);
}

/// Gives a model the parameters and the buffers of others, which have the same layers.
void take_state(const Sequential& model, const Sequential& of_parameters, const Sequential& of_buffers) {
  const torch::NoGradGuard no_grad;
  const auto copy = [](const Tensors& to, const Tensors& from) {
    for (std::size_t k = 0; k < to.size(); ++k) to[k].copy_(from[k]);
  };
  copy(model->parameters(), of_parameters->parameters());
  copy(model->buffers(), of_buffers->buffers());
}

void add(Tensor& sum, const Tensor& gradient) {
  if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient;
}

/// Returns what the replica of `ranks` leaves, or the only one. `cut`: with the boundaries of the pipeline.
CaseResults run_reference(const Spec& spec, bool cut, const std::optional<Devices>& devices, const Ranks* ranks) {
  std::vector<Sequential> models;  // of the replicas
  for (int r = 0; r < (ranks ? ranks->replicas() : 1); ++r) models.push_back(build(spec));
  auto& own = models[ranks ? ranks->replica() : 0];
  std::optional<Devices> here;
  if (devices) {
    own->to(devices->reference);
    here = Devices{{}, devices->reference, devices->reference, devices->reference};
  }
  const auto balance = cut ? balance_of(spec, own) : Balance{static_cast<std::int64_t>(own->size())};
  const auto placement =
      cut ? std::vector(spec.placement.begin(), spec.placement.begin() + std::ssize(balance)) : std::vector<int>{0};
  const auto fills = spec.schedule.empty() || fills_and_drains(spec.schedule);
  int micro_batches = 0;  // of the replicas so far
  const auto train_one = [&](const Sequential& model, const Call& call) {
    ReferenceStep step{.input = call.input(),
                       .sizes = sizes_of(spec, model, call.samples()),
                       .placement = placement,
                       .ascending = !fills,
                       .first_micro_batch = micro_batches};
    micro_batches += static_cast<int>(step.sizes.size());
    if (spec.schedule.empty()) {
      step.gradients_of = [share = static_cast<double>(call.samples()) / spec.batch](const Tensors& outputs) {
        auto gradients = gradients_of(outputs);
        for (auto& gradient : gradients) gradient = gradient.defined() ? gradient * share : gradient;
        return gradients;
      };
    } else {
      step.loss = [scale = spec.scaled ? kScale : 1](const Value& output, const Value& target) {
        return weighted_sum(output, target) * scale;
      };
      step.target = Value(call.target);
    }
    const Autocast autocast(spec.autocast);
    auto outputs = reference(model, balance, step);
    if (!spec.backward_twice) return outputs;
    auto leaves = distinct_parameters(*model);
    leaves.push_back(call.inputs[0]);
    for (const auto& leaf : leaves) {
      if (leaf.grad().defined()) leaf.mutable_grad() = leaf.grad() + leaf.grad();
    }
    return outputs;
  };
  const auto train = [&](const Call& call, bool eval) {
    micro_batches = 0;
    for (auto& model : models) model->train(!eval);
    if (models.size() == 1) return train_one(own, call);
    for (const auto& model : models) take_state(model, own, models[0]);
    const auto parameters = distinct_parameters(*own);
    Tensors before, outputs, sums(parameters.size());
    for (const auto& parameter : parameters) before.push_back(std::exchange(parameter.mutable_grad(), {}));
    for (int r = 0; r < ranks->replicas(); ++r) {
      const auto of_replica = r == ranks->replica() ? call : Call(spec, call.number, here, ranks, r);
      torch::manual_seed(spec.seed + call.number + 1);
      auto of_outputs = train_one(models[r], of_replica);
      if (r == ranks->replica()) outputs = std::move(of_outputs);
      const auto of_model = distinct_parameters(*models[r]);
      for (std::size_t p = 0; p < sums.size(); ++p) add(sums[p], std::exchange(of_model[p].mutable_grad(), {}));
    }
    for (std::size_t p = 0; p < sums.size(); ++p) {
      add(before[p], sums[p]);
      parameters[p].mutable_grad() = before[p];
    }
    return outputs;
  };
  return results_of(
      spec, own, here, ranks, train, [](const Tensor&) { return true; }, /*has_input=*/true);
}

/// Whether each stage held as many graphs at once as the verifier says, and holds none now.
bool live_graphs_as_verified(const Spec& spec, const Sequential& model, GPipe& pipe, std::int64_t samples) {
  const auto program = pipe->program(static_cast<int>(sizes_of(spec, model, samples).size()));
  const auto& layout = program->layout();
  const auto schedule = spec.schedule.empty() ? fill_drain(layout, spec.checkpoint) : program->schedule();
  const auto peaks = verify(layout, program->edges(), schedule);
  // An I may free the layer's part of the graph before the W. A second backward keeps graphs, and eval mode has others.
  const bool is_exact =
      !spec.splits() && !spec.backward_twice && !spec.eval && spec.frozen == 0 && !spec.has(Unit::kDrops);
  std::size_t layer = 0;
  for (std::size_t stage = 0; stage < pipe->balance().size(); ++stage) {
    for (auto left = pipe->balance()[stage]; left > 0; --left) {
      const auto module = model->ptr(layer++);
      const auto* peak = module->as<PeakImpl>();
      if (!peak || peak->live->peak == 0) continue;
      const int verified = peaks.graphs[stage];
      if ((is_exact && peak->live->peak != verified) || peak->live->now != 0) return false;
      if (spec.splits() && peak->live->peak > verified) return false;
    }
  }
  return true;
}

/// Calls a function, perhaps on a thread of its own.
template <class Function>
auto call_on_thread(bool own, Function function) {
  return std::async(own ? std::launch::async : std::launch::deferred, std::move(function)).get();
}

std::vector<bool> modes_of(const torch::nn::Module& module) {
  std::vector<bool> modes;
  for (const auto& each : module.modules()) modes.push_back(each->is_training());
  return modes;
}

Tensors train_by_forward(const Spec& spec, GPipe& pipe, const Call& call) {
  const auto outputs = call_on_thread(spec.threads, [&] {
    const Autocast autocast(spec.autocast);
    return pipe->forward(call.input()).tensors();
  });
  const auto gradients = gradients_of(outputs);
  const auto backward = [&](bool retain_graph) {
    Tensors roots;
    Tensors given;  // PyTorch may store a view of a gradient in .grad, and add to it later
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      if (!gradients[k].defined()) continue;
      roots.push_back(outputs[k]);
      given.push_back(gradients[k].clone());
    }
    if (roots.empty()) return;
    call_on_thread(spec.threads, [&] { torch::autograd::backward(roots, given, retain_graph); });
  };
  const bool training = pipe->is_training();
  if (spec.switches) pipe->train(!training);
  const auto modes = modes_of(*pipe);
  if (spec.backward_twice) backward(/*retain_graph=*/true);
  backward(/*retain_graph=*/false);
  if (modes_of(*pipe) != modes) throw std::logic_error("a backward has changed modes");
  if (spec.switches) pipe->train(training);
  return outputs;
}

Tensors train_by_step(const Spec& spec, GPipe& pipe, const Call& call) {
  const Autocast autocast(spec.autocast);
  const auto options = StepOptions(kOfSums).scale(spec.scaled ? kScale : 1);
  if (spec.computes_loss) {
    const auto loss = pipe->compute_loss(call.input(), call.target, weighted_sum, options);
    if (loss.requires_grad()) loss.backward();
    return {};
  }
  return pipe->step(call.input(), call.target, weighted_sum, StepOptions(options).return_output(true)).output.tensors();
}

LayerFactories factories_of(Sequential model) {
  LayerFactories factories;
  for (const auto& layer : *model) factories.emplace_back([layer] { return layer; });
  return factories;
}

CaseResults run_pipeline(const Spec& spec, const std::optional<Devices>& devices, const std::shared_ptr<Ranks>& ranks) {
  auto model = build(spec);
  if (ranks && ranks->replica() > 0) {  // which takes the first one's values
    const torch::NoGradGuard no_grad;
    for (const auto& list : {model->parameters(), model->buffers()}) {
      for (const auto& tensor : list) tensor.zero_();
    }
  }
  auto options = in_chunks(spec.chunks, spec.checkpoint).intraop_threads(1).ranks(ranks).placement(spec.placement);
  const bool is_listed = spec.schedule == kLists;
  const Layout layout{spec.stages(), static_cast<int>(spec.chunks), spec.placement};
  if (!spec.schedule.empty()) options.schedule(is_listed ? to_text(list_schedule(layout)) : spec.schedule);
  options.deferred_batch_norm(spec.deferred);
  if (devices) options.devices({devices->workers.begin(), devices->workers.begin() + spec.workers});
  const auto balance = balance_of(spec, model);
  auto pipe = spec.factories ? GPipe(factories_of(model), balance, options) : GPipe(model, balance, options);
  const auto is_here_worker = [&](int worker) {
    return !ranks || ranks->mesh().ranks_of_workers(spec.workers, ranks->replica())[worker] == ranks->rank();
  };
  const bool has_input = is_here_worker(spec.placement.front());
  const auto train = [&](Call call, bool eval) {
    pipe->train(!eval);
    for (auto& input : call.inputs) {  // what ranks give that do not read it counts for nothing
      if (!has_input) input = torch::zeros_like(input).requires_grad_(input.requires_grad());
    }
    if (!is_here_worker(spec.placement.back())) call.target = torch::zeros_like(call.target);
    if (spec.schedule.empty()) return train_by_forward(spec, pipe, call);
    return call_on_thread(spec.threads, [&] { return train_by_step(spec, pipe, call); });
  };
  const auto is_here = [&](const Tensor& tensor) {
    return is_one_of(tensor, pipe->parameters()) || is_one_of(tensor, pipe->buffers());
  };
  auto results = results_of(spec, model, devices, ranks.get(), train, is_here, has_input);
  const auto [begin, end] = part_of(spec, ranks.get(), ranks ? ranks->replica() : 0);
  if (!live_graphs_as_verified(spec, model, pipe, end - begin)) results["the live graphs"];
  return results;
}

/// Equal up to the tolerance, or both undefined; equal also where both are NaN.
bool same_or_nan(const Tensor& a, const Tensor& b, double tolerance) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() &&
         torch::allclose(a.cpu(), b.cpu(), tolerance, tolerance, /*equal_nan=*/true);
}

Outcome difference(const CaseResults& got, const CaseResults& expected, double tolerance) {
  for (const auto& [name, tensor] : got) {
    const auto found = expected.find(name);
    if (found != expected.end() && same_or_nan(tensor, found->second, tolerance)) continue;
    return {Outcome::kDifferent,
            name + (tolerance == 0 ? " has other bits than the reference's" : " differs from the whole model's")};
  }
  return {};
}

}  // namespace

Outcome compare(const Spec& spec, const std::optional<Devices>& devices, const std::shared_ptr<Ranks>& ranks) {
  const absl::Cleanup put_back = [type = torch::get_default_dtype()] { torch::set_default_dtype(type); };
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(spec.single ? torch::kFloat : torch::kDouble));
  CaseResults whole;
  try {
    whole = run_reference(spec, /*cut=*/false, devices, ranks.get());
  } catch (const std::exception& error) {
    return {Outcome::kNoModel, text_of(error)};
  }
  try {
    const auto got = run_pipeline(spec, devices, ranks);
    // Errors of single precision can grow. The order in which more than two replicas are summed is c10d's.
    const bool has_bits = !devices && !spec.has(Unit::kUnordered) && (!ranks || ranks->replicas() <= 2);
    auto outcome = has_bits ? difference(got, run_reference(spec, /*cut=*/true, devices, ranks.get()), 0) : Outcome();
    if (outcome.verdict == Outcome::kEqual && !spec.single) outcome = difference(got, whole, 1e-9);
    return outcome;
  } catch (const std::exception& error) {
    const auto text = "the pipeline throws: " + text_of(error);
    const bool is_documented =
        text.find("changed in place") != std::string::npos || text.find("modified inplace") != std::string::npos;
    return {is_documented && spec.may_be_refused() ? Outcome::kRefused : Outcome::kDifferent, text};
  }
}

}  // namespace gpipe
