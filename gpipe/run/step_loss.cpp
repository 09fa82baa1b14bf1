#include "gpipe/run/step_loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <numeric>

namespace gpipe {

void Outputs::add(int micro_batch, Parcel part) {
  for (const auto& tensor : part.tensors) note_device(tensor);
  parts_[micro_batch] = std::move(part);
}

void Outputs::note_device(const at::Tensor& result) {
  if (!result.defined() || result.device() == device_) return;
  const auto found = std::ranges::find(other_devices_, result.device());
  if (found == other_devices_.end()) other_devices_.push_back(result.device());
}

Gathered Outputs::gather() {
  const auto parts = std::exchange(parts_, {});
  for (const auto& part : parts) {
    for (const auto& tensor : part.tensors) use_on_current_stream(tensor);
  }
  return gpipe::gather(parts);
}

class StepLoss::LossLayer : public Layer {
 public:
  LossLayer(StepLoss& loss, int micro_batch, Outputs& outputs)
      : loss_(loss), micro_batch_(micro_batch), outputs_(outputs) {}

  Value forward(Value output) override {
    if (loss_.keeps_outputs()) {
      Parcel kept;
      kept.add_leaving(output);
      outputs_.add(micro_batch_, std::move(kept));
    }
    auto target = loss_.targets_.receive(micro_batch_);
    auto loss = call_loss(loss_.function_, output, target);
    auto& result = loss_.losses_[micro_batch_];
    result = loss.variable_data();
    outputs_.note_device(result);
    if (loss_.comparison_) loss_.comparison_->add(micro_batch_, output, std::move(target), result);
    return loss;
  }

  const std::string& name() const override { return name_; }
  std::shared_ptr<torch::nn::Module> module() const override { return nullptr; }

 private:
  StepLoss& loss_;
  const int micro_batch_;
  Outputs& outputs_;
  const std::string name_ = "loss";
};

// On ranks without the last stage, the targets do not count.
StepLoss::StepLoss(Pipeline& pipeline, LossFunction function, StepOptions options, std::vector<Parcel> targets,
                   const std::vector<std::int64_t>& sizes)
    : pipeline_(pipeline),
      function_(std::move(function)),
      options_(std::move(options)),
      weights_(pipeline.is_here(pipeline.count() - 1) ? loss_weights(options_, sizes, targets)
                                                      : std::vector<double>(sizes.size())),
      targets_(pipeline, std::move(targets), pipeline.stages().back().device),
      losses_(sizes.size()) {}

double StepLoss::weight() const { return std::accumulate(weights_.begin(), weights_.end(), 0.0); }

void StepLoss::begin_comparison() {
  const bool is_here = pipeline_.is_here(pipeline_.count() - 1);
  if (!options_.check() || !is_here || losses_.size() == 1 || pipeline_.compared_losses().contains(kind())) return;
  comparison_.emplace(function_, static_cast<int>(losses_.size()));
}

void StepLoss::end_comparison() {
  if (comparison_) pipeline_.compared_losses().insert(kind());
  comparison_.reset();
}

std::unique_ptr<Layer> StepLoss::layer(int micro_batch, Outputs& outputs) {
  return std::make_unique<LossLayer>(*this, micro_batch, outputs);
}

at::Tensor StepLoss::gradient(int micro_batch) const {
  const double weight = weights_[micro_batch];
  if (weight == 0) return {};  // 0 * NaN would be NaN
  return at::scalar_tensor(weight * options_.scale(), losses_[micro_batch].options());
}

at::Tensor StepLoss::join() {
  const auto losses = std::exchange(losses_, {});
  for (const auto& loss : losses) use_on_current_stream(loss);
  return join_losses(losses, weights_);
}

namespace {

// Returns the sum of the replicas' parts of a loss, in their order. The part of a replica without samples is undefined.
at::Tensor sum_over_replicas(const at::Tensor& part, Pipeline& pipeline) {
  if (pipeline.team().replicas() == 1) return part;
  at::NoGradGuard no_grad;
  Parcel parcel;
  parcel.add(part, /*gradient_wanted=*/false);
  at::Tensor sum;
  for (const auto& each : pipeline.team().all_gather(std::move(parcel))) {
    const auto& other = each.tensors.front();
    if (other.defined()) sum = sum.defined() ? sum + other.to(at::kCPU) : other.to(at::kCPU);
  }
  return sum.to(part.defined() ? part.device() : pipeline.stages().back().device);
}

}  // namespace

Results share_results(Pipeline& pipeline, Outputs& outputs, StepLoss* loss) {
  auto& team = pipeline.team();
  const bool wants_outputs = loss == nullptr || loss->keeps_outputs();
  const int last = pipeline.count() - 1;
  Results results;
  Parcel parcel;
  if (pipeline.is_here(last)) {
    if (loss != nullptr) results.loss = sum_over_replicas(loss->join(), pipeline);
    if (wants_outputs) results.outputs = outputs.gather();
    const auto& value = results.outputs.value;
    parcel.form = value.form();
    parcel.add(results.loss, /*gradient_wanted=*/false);
    for (std::size_t k = 0; k < value.tensors().size(); ++k) {
      parcel.add(value.tensors()[k], results.outputs.wants_gradient[k]);
    }
  }
  const auto group = wants_outputs ? Team::Group::kReplicaOutputs : Team::Group::kReplica;
  parcel = team.broadcast(group, pipeline.rank_of(last), std::move(parcel));
  if (!pipeline.is_here(last)) {
    results.loss = parcel.tensors.front();
    results.outputs.wants_gradient.assign(parcel.wants_gradient.begin() + 1, parcel.wants_gradient.end());
    results.outputs.value = Value(parcel.form, {parcel.tensors.begin() + 1, parcel.tensors.end()});
  }
  return results;
}

}  // namespace gpipe
