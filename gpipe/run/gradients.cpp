#include "gpipe/run/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>

#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

// Returns the tensors of all replicas, in their order.
std::vector<std::vector<at::Tensor>> of_replicas(const std::vector<at::Tensor>& own, Team& team) {
  Parcel parcel;
  for (const auto& tensor : own) parcel.add(tensor, /*gradient_wanted=*/false);
  std::vector<std::vector<at::Tensor>> all;
  for (auto& each : team.all_gather(std::move(parcel))) all.push_back(std::move(each.tensors));
  return all;
}

// Returns the sum of the replicas' parts of a loss, in their order. The part of a replica without samples is undefined.
at::Tensor sum_over_replicas(const at::Tensor& part, Pipeline& pipeline) {
  if (pipeline.team().replicas() == 1) return part;
  at::NoGradGuard no_grad;
  at::Tensor sum;
  for (const auto& each : of_replicas({part.defined() ? part.cpu() : part}, pipeline.team())) {
    const auto& other = each.front();
    if (other.defined()) sum = sum.defined() ? sum + other : other;
  }
  const auto device = part.defined() ? part.device() : pipeline.stages().back().device;
  return at::scalar_tensor(sum.item(), sum.options().device(device));  // by a fill, for which the host need not wait
}

}  // namespace

BackwardGradients::BackwardGradients(Pipeline& pipeline, const std::vector<ParameterSinks>& sinks, int micro_batches,
                                     bool accumulates)
    : sinks_(sinks), inputs_(micro_batches), backwards_left_(sinks.size(), micro_batches) {
  std::vector<std::vector<at::Tensor>> parameters;
  for (const auto& of_stage : sinks) {
    sums_.emplace_back(of_stage.parameters().size());
    parameters.push_back(of_stage.parameters());
  }
  if (pipeline.team().replicas() == 1) {
    for (std::size_t s = 0; accumulates && s < sinks.size(); ++s) {
      for (std::size_t p = 0; p < parameters[s].size(); ++p) {
        sums_[s].accumulate(p, accumulator_of(parameters[s][p]));
      }
    }
    return;
  }
  reduction_ = std::make_unique<GradientReduction>(pipeline.team(), std::move(parameters));
}

void BackwardGradients::set_outputs(std::vector<Gradients> gradients, double share) {
  outputs_ = std::move(gradients);
  if (reduction_) {
    for (auto& of_micro_batch : outputs_) {
      for (auto& gradient : of_micro_batch) {
        if (gradient.defined()) gradient = share == 0 ? at::Tensor() : gradient * share;
      }
    }
  }
  for (const auto& gradient : outputs_.front()) {
    outputs_ready_.push_back(gradient.defined() ? record_event(gradient.device()) : nullptr);
  }
}

Gradients BackwardGradients::outputs(int micro_batch) {
  auto gradients = std::move(outputs_[micro_batch]);
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    if (gradients[k].defined()) wait(outputs_ready_[k], gradients[k].device());
  }
  return gradients;
}

GradientSums& BackwardGradients::sums(int stage) {
  sums_[stage].resize(sinks_[stage].parameters().size());  // a loss may have leaves of its own
  return sums_[stage];
}

void BackwardGradients::end_backward(int stage) {
  if (reduction_ && --backwards_left_[stage] == 0) reduction_->send(stage, sums_[stage].take_unshared());
}

BackwardGradients::Result BackwardGradients::take() {
  if (reduction_) return {std::move(inputs_), reduction_->take()};
  Result result{std::move(inputs_), {}};
  for (auto& sums : sums_) result.parameters.push_back(sums.take_unshared());
  return result;
}

std::vector<at::Tensor> Results::tensors() const {
  auto all = outputs.value.tensors();
  all.push_back(loss);
  for (const auto* list : {&gradients.inputs, &gradients.parameters}) {
    for (const auto& each : *list) all.insert(all.end(), each.begin(), each.end());
  }
  return all;
}

Results share_results(Pipeline& pipeline, Outputs& outputs, StepLoss* loss) {
  auto& team = pipeline.team();
  const bool wants_outputs = loss == nullptr || loss->keeps_outputs();
  const int last = pipeline.count() - 1;
  Results results;
  Parcel parcel;
  if (pipeline.is_here(last)) {
    if (loss != nullptr) results.loss = sum_over_replicas(loss->join(), pipeline);
    if (wants_outputs) results.outputs = outputs.gather();
    if (team.size() == 1) return results;
    const auto& value = results.outputs.value;
    parcel.form = value.form();
    parcel.add(results.loss, /*gradient_wanted=*/false);
    for (std::size_t k = 0; k < value.tensors().size(); ++k) {
      const auto& output = value.tensors()[k];
      const bool has_values = !output.defined() || team.shares_outputs();
      parcel.add(has_values ? output : output.to(at::kMeta), results.outputs.wants_gradient[k]);
    }
  }
  parcel = team.broadcast(Team::Group::kReplica, pipeline.rank_of(last), std::move(parcel));
  if (!pipeline.is_here(last)) {
    results.loss = parcel.tensors.front();
    results.outputs.wants_gradient.assign(parcel.wants_gradient.begin() + 1, parcel.wants_gradient.end());
    results.outputs.value = Value(parcel.form, {parcel.tensors.begin() + 1, parcel.tensors.end()});
  }
  return results;
}

void commit_statistics(Pipeline& pipeline, std::vector<BatchStatistics>& statistics) {
  for (std::size_t s = 0; s < statistics.size(); ++s) {
    const auto buffers = pipeline.stages()[s].buffers();
    if (pipeline.team().replicas() == 1 || buffers.empty()) continue;
    statistics[s].join(buffers, of_replicas(statistics[s].to_tensors(buffers), pipeline.team()));
  }
  for (std::size_t s = 0; s < statistics.size(); ++s) statistics[s].commit(pipeline.stages()[s]);
}

}  // namespace gpipe
