#include "gpipe/run/history.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/pipeline_node.h"
#include "gpipe/tensors/version_watch.h"

namespace gpipe {
namespace {

// Returns the gradients of sources_of(), in order: of the inputs, joined over the micro-batches, then of the parameters.
std::vector<at::Tensor> gradients_of_sources(BackwardGradients::Result result, const std::vector<std::int64_t>& sizes,
                                             const std::vector<torch::Device>& devices, const Team& team) {
  std::vector<at::Tensor> all;
  for (std::size_t k = 0; k < devices.size(); ++k) {
    std::vector<at::Tensor> pieces;
    for (auto& part : result.inputs) pieces.push_back(part.empty() ? at::Tensor() : std::move(part[k]));
    auto gradient = gather_gradient(std::move(pieces), sizes);
    if (gradient.defined() && gradient.device() != devices[k]) gradient = gradient.to(devices[k]);
    all.push_back(unshared(std::move(gradient)));
  }
  for (const auto& sums : result.parameters) all.insert(all.end(), sums.begin(), sums.end());
  if (team.size() > 1) all.emplace_back();
  return all;
}

std::vector<torch::Device> devices_of(const Value& value) {
  std::vector<torch::Device> devices;
  for (const auto& tensor : value.tensors()) devices.push_back(tensor.device());
  return devices;
}

// The devices of the parameters and of the input.
std::vector<torch::Device> devices_of_gradients(const Pipeline& pipeline, const Value& input) {
  auto devices = devices_of(input);
  devices.insert(devices.end(), pipeline.devices().begin(), pipeline.devices().end());
  return devices;
}

}  // namespace

std::vector<at::Tensor> sources_of(const MiniBatch& mini_batch, const Pipeline& pipeline, const Value& input) {
  auto sources = input.tensors();
  for (int s = 0; s < pipeline.count(); ++s) {
    const auto& parameters = mini_batch.sinks(s).parameters();
    sources.insert(sources.end(), parameters.begin(), parameters.end());
  }
  if (pipeline.team().size() > 1) sources.push_back(at::zeros({}).requires_grad_());
  return sources;
}

void attach_forward(std::shared_ptr<MiniBatch> mini_batch, std::shared_ptr<Pipeline> pipeline, const Value& input,
                    const std::vector<std::int64_t>& sizes, const Gathered& output) {
  const auto& wanted = output.wants_gradient;
  if (std::none_of(wanted.begin(), wanted.end(), [](bool is) { return is; })) return;
  const auto sources = sources_of(*mini_batch, *pipeline, input);
  auto backward = [pipeline, mini_batch = std::move(mini_batch), sizes, output_sizes = output.sizes,
                   devices = devices_of(input),
                   entered = std::vector<VersionWatch>(input.tensors().begin(), input.tensors().end())](
                      std::vector<at::Tensor> gradients, bool retain_graph) {
    auto result = in_call(*pipeline, [&](Call& call) {
      pipeline->set_error(std::nullopt);
      // Micro-batches have version counters of their own.
      if (std::any_of(entered.begin(), entered.end(), [](const auto& version) { return version.changed(); })) {
        throw std::runtime_error(
            "[gpipe] an input was changed in place between the forward and its backward; change a clone instead");
      }
      std::vector<Gradients> of_parts(sizes.size());
      for (std::size_t k = 0; k < output_sizes.size(); ++k) {
        auto pieces = scatter_gradient(gradients[k], output_sizes[k]);
        for (std::size_t i = 0; i < of_parts.size(); ++i) of_parts[i].push_back(std::move(pieces[i]));
      }
      return mini_batch->backward(call, std::move(of_parts), retain_graph);
    });
    auto all = gradients_of_sources(std::move(result), sizes, devices, pipeline->team());
    pipeline->team().watch_backward(pipeline);
    return all;
  };
  attach_backward(output.value.tensors(), wanted, sources, devices_of_gradients(*pipeline, input), std::move(backward));
}

void attach_step(MiniBatch::StepOutcome& outcome, std::shared_ptr<Pipeline> pipeline, const Value& input,
                 const std::vector<at::Tensor>& sources, const std::vector<std::int64_t>& sizes,
                 std::shared_ptr<const at::Tensor> unit) {
  auto gradients = gradients_of_sources(std::move(outcome.gradients), sizes, devices_of(input), pipeline->team());
  if (std::none_of(sources.begin(), sources.end(), [](const auto& source) { return source.requires_grad(); })) return;
  auto hand_out = [pipeline, gradients = std::move(gradients), unit = std::move(unit)](std::vector<at::Tensor> incoming,
                                                                                       bool retain_graph) mutable {
    pipeline->team().watch_backward(pipeline);
    auto handed = retain_graph ? gradients : std::move(gradients);
    // step() itself asks for the gradients as they are.
    if (unit && incoming.front().is_same(*unit)) return handed;
    for (auto& gradient : handed) {
      if (!gradient.defined()) continue;
      gradient = incoming.front().defined() ? gradient * incoming.front().to(gradient.device()) : at::Tensor();
    }
    return handed;
  };
  attach_backward({outcome.loss}, {true}, sources, devices_of_gradients(*pipeline, input), std::move(hand_out));
}

}  // namespace gpipe
