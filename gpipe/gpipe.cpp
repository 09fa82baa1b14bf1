#include "gpipe/gpipe.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "gpipe/autograd/pipeline_node.h"
#include "gpipe/checks.h"
#include "gpipe/micro_batch.h"
#include "gpipe/mini_batch.h"
#include "gpipe/refuse.h"
#include "gpipe/stages.h"

namespace gpipe {
namespace {

using Layers = std::vector<std::unique_ptr<Layer>>;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("[gpipe] " + what); }

void check_options(const GPipeOptions& options) {
  check_chunks(options.chunks());
  if (options.split_size() < 0) {
    refuse("split_size must be positive, or 0 for none, but is " + std::to_string(options.split_size()));
  }
  if (options.split_size() > 0 && options.chunks() != 1) {
    refuse("chunks (" + std::to_string(options.chunks()) + ") and split_size (" + std::to_string(options.split_size()) +
           ") exclude each other; set only one of them");
  }
  if (options.intraop_threads() < 0) {
    refuse("intraop_threads must be positive, or 0 for an equal share, but is " +
           std::to_string(options.intraop_threads()));
  }
}

int share_of_threads(const std::vector<torch::Device>& devices) {
  const auto workers = std::count_if(devices.begin(), devices.end(), [](const auto& d) { return d.is_cpu(); });
  return std::max(1, at::get_num_threads() / std::max(1, static_cast<int>(workers)));
}

// The inputs with their version counters, to detect later in-place changes.
Parcel as_entered(const Value& input) {
  Parcel entered;
  for (const auto& tensor : input.tensors()) entered.add(tensor.detach(), /*gradient_wanted=*/false);
  return entered;
}

// Gives the outputs that want a gradient their history: one autograd node over the inputs and all parameters. Calls no
// operator, because an error here would leave buffers changed.
void attach(std::shared_ptr<MiniBatch> mini_batch, std::shared_ptr<Pipeline> pipeline, const Value& input,
            Parcel entered, const std::vector<std::int64_t>& sizes, const Gathered& output) {
  auto sources = input.tensors();
  for (int s = 0; s < pipeline->count(); ++s) {
    const auto& parameters = mini_batch->sinks(s).parameters();
    sources.insert(sources.end(), parameters.begin(), parameters.end());
  }
  const auto& wanted = output.wants_gradient;
  if (std::none_of(wanted.begin(), wanted.end(), [](bool is) { return is; })) return;
  std::vector<torch::Device> devices;
  for (const auto& tensor : input.tensors()) devices.push_back(tensor.device());
  auto backward = [pipeline, mini_batch = std::move(mini_batch), sizes, output_sizes = output.sizes, devices,
                   entered = std::move(entered)](std::vector<at::Tensor> gradients, bool retain_graph) {
    pipeline->set_error(std::nullopt);
    // Micro-batches have version counters of their own.
    if (entered.changed()) {
      throw std::runtime_error(
          "[gpipe] an input was changed in place between the forward and its backward; change a clone instead");
    }
    std::vector<Gradients> of_parts(sizes.size());
    for (std::size_t k = 0; k < output_sizes.size(); ++k) {
      auto pieces = scatter_gradient(gradients[k], output_sizes[k]);
      for (std::size_t i = 0; i < of_parts.size(); ++i) of_parts[i].push_back(std::move(pieces[i]));
    }
    auto result = mini_batch->backward(std::move(of_parts), retain_graph);
    std::vector<at::Tensor> all;
    for (std::size_t k = 0; k < devices.size(); ++k) {
      std::vector<at::Tensor> pieces;
      for (auto& part : result.inputs) pieces.push_back(std::move(part[k]));
      auto gradient = gather_gradient(std::move(pieces), sizes);
      if (gradient.defined() && gradient.device() != devices[k]) gradient = gradient.to(devices[k]);
      all.push_back(unshared(std::move(gradient)));
    }
    for (const auto& sums : result.parameters) all.insert(all.end(), sums.begin(), sums.end());
    return all;
  };
  attach_backward(output.value.tensors(), wanted, sources, std::move(backward));
}

}  // namespace

GPipeImpl::GPipeImpl(Layers layers, std::vector<std::int64_t> balance, GPipeOptions options, LanguageBinding binding)
    : balance_(std::move(balance)), options_(std::move(options)) {
  check_balance(balance_, layers.size());
  check_distinct(layers);
  check_options(options_);
  std::vector<NamedLayer> named;
  for (const auto& layer : layers) named.push_back({layer->name(), layer->module()});
  const auto links = skip_links(named);
  devices_ = place_stages(options_.devices(), balance_.size());
  auto stages = cut_into_stages(std::move(layers), balance_, devices_);
  check_parameters(stages);
  auto shared = find_shared_buffers(stages);
  auto edges = connect_stages(stages, balance_, links);
  for (std::size_t s = 0; s < binding.run_layers.size(); ++s) stages.at(s).run_layers = binding.run_layers[s];
  for (auto& stage : stages) {
    stage.lock = binding.lock;
    move_to_device(stage);
    for (const auto& layer : stage.layers) register_module(layer->name(), layer->module());
  }
  const int threads = options_.intraop_threads() > 0 ? options_.intraop_threads() : share_of_threads(devices_);
  pipeline_ =
      std::make_shared<Pipeline>(std::move(stages), std::move(edges), std::move(shared), threads, std::move(binding));
}

GPipeImpl::GPipeImpl(const torch::nn::Sequential& model, std::vector<std::int64_t> balance, GPipeOptions options)
    : GPipeImpl(make_layers(*model), std::move(balance), std::move(options)) {}

GPipeImpl::GPipeImpl(const NestedSequential& model, std::vector<std::int64_t> balance, GPipeOptions options)
    : GPipeImpl(make_layers(*model), std::move(balance), std::move(options)) {}

torch::Tensor GPipeImpl::forward(torch::Tensor input) { return forward(Value(std::move(input))).tensor(); }

std::vector<torch::Tensor> GPipeImpl::forward(std::vector<torch::Tensor> input) {
  return forward(Value(std::move(input))).tensors();
}

Value GPipeImpl::forward(Value input) {
  pipeline_->set_error(std::nullopt);
  const auto sizes = micro_batch_sizes(batch_size(input), options_.chunks(), options_.split_size());
  return run(std::move(input), sizes, is_training() ? options_.checkpoint() : Checkpoint::kNever);
}

Value GPipeImpl::forward(Value input, std::int64_t chunks, Checkpoint checkpoint) {
  pipeline_->set_error(std::nullopt);
  check_chunks(chunks);
  const auto sizes = micro_batch_sizes(batch_size(input), chunks, /*split_size=*/0);
  return run(std::move(input), sizes, checkpoint);
}

Value GPipeImpl::run(Value input, const std::vector<std::int64_t>& sizes, Checkpoint checkpoint) {
  refuse_transforms(input, pipeline_->stages());
  const bool grad = at::GradMode::is_enabled();
  auto mini_batch =
      std::make_shared<MiniBatch>(pipeline_, scatter(input, sizes), checkpoint, grad, options_.deferred_batch_norm());
  auto entered = grad ? as_entered(input) : Parcel();
  auto output = mini_batch->forward();
  if (grad) attach(std::move(mini_batch), pipeline_, input, std::move(entered), sizes, output);
  return std::move(output.value);
}

std::optional<ErrorInfo> GPipeImpl::last_error() const { return pipeline_->error(); }

void GPipeImpl::trace(std::shared_ptr<Timeline> timeline) { pipeline_->set_timeline(std::move(timeline)); }

std::shared_ptr<const Program> GPipeImpl::program(int micro_batches) const {
  if (micro_batches <= 0) refuse("micro_batches must be positive, but is " + std::to_string(micro_batches));
  return pipeline_->program(micro_batches, options_.checkpoint(), /*backward=*/true);
}

void GPipeImpl::load(torch::serialize::InputArchive& archive) {
  torch::nn::Module::load(archive);
  for (const auto& stage : pipeline_->stages()) move_to_device(stage);
}

void GPipeImpl::to(torch::Device device, torch::Dtype, bool non_blocking) { to(device, non_blocking); }

void GPipeImpl::to(torch::Device device, bool) {
  TORCH_CHECK_TYPE(false, "[gpipe] cannot move to ", device,
                   ": a pipeline's parameters are placed on its devices; pass GPipeOptions().devices(...) instead");
}

}  // namespace gpipe
