// What a mini-batch does together with other ranks.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "gpipe/mini_batch.h"
#include "gpipe/sample_hash.h"

namespace gpipe {
namespace {

// Returns the sum of the replicas' parts of the loss, in their order. The part of a replica without samples is undefined.
at::Tensor sum_over_replicas(const at::Tensor& part, Peers& peers, c10::Device device) {
  at::NoGradGuard no_grad;
  Parcel parcel;
  parcel.add(part, /*gradient_wanted=*/false);
  at::Tensor sum;
  for (const auto& each : peers.exchange(std::move(parcel))) {
    const auto& other = each.tensors.front();
    if (other.defined()) sum = sum.defined() ? sum + other.to(at::kCPU) : other.to(at::kCPU);
  }
  return sum.to(part.defined() ? part.device() : device);
}

}  // namespace

// Over ranks, an error before a call makes the other ranks' call throw too.
void MiniBatch::prepare_call(absl::FunctionRef<void()> prepare) {
  try {
    prepare();
  } catch (...) {
    if (auto* peers = pipeline_->peers()) peers->withdraw(message_of(std::current_exception()));
    throw;
  }
}

// Agrees with the other ranks on the call: on its random numbers, and on the weight of each replica's part.
void MiniBatch::agree() {
  double total = std::accumulate(loss_.weights.begin(), loss_.weights.end(), 0.0);
  const auto samples = std::accumulate(options_.sizes.begin(), options_.sizes.end(), std::int64_t{0});
  if (auto* peers = pipeline_->peers()) {
    const auto verdict = peers->agree({.what = options_.call,
                                       .in_common = options_.in_common,
                                       .of_twins = has_replicas() ? trained_parameters() : "",
                                       .number = peers->rank() == 0 ? seed_ : 0,
                                       .weight = loss_.function ? total : static_cast<double>(samples),
                                       .micro_batches = samples == 0 ? 0 : micro_batches_,
                                       .data = options_.data});
    seed_ = verdict.largest;
    call_number_ = peers->calls();
    total = std::accumulate(verdict.weights.begin(), verdict.weights.end(), 0.0);
    const int replica = peers->replica();
    share_ = total == 0 ? 0 : verdict.weights[replica] / total;
    first_micro_batch_ = std::accumulate(verdict.micro_batches.begin(), verdict.micro_batches.begin() + replica, 0);
  }
  if (loss_.function) normalize(loss_.weights, total, loss_.reduction);
}

// Which of this rank's parameters get gradients, and what their values are, in a few words.
std::string MiniBatch::trained_parameters() const {
  std::size_t count = 0;
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  std::vector<at::Tensor> own;
  for (const auto& sinks : sinks_) {
    own.insert(own.end(), sinks.own().begin(), sinks.own().end());
    for (std::size_t p = 0; p < sinks.all().size(); ++p) {
      count += sinks.has_sink()[p];
      const auto size = static_cast<std::uint64_t>(sinks.all()[p].numel());
      hash = (hash ^ (sinks.has_sink()[p] ? size + 1 : 0)) * 1099511628211u;
    }
  }
  return "trains " + std::to_string(count) + " parameters, whose sizes have the hash " + std::to_string(hash) +
         ", of values with the hash " + std::to_string(sample_hash(own));
}

void MiniBatch::take(const Action& action) {
  if (exchange_) exchange_->take(action);
}

void MiniBatch::put(const Action& action) {
  if (exchange_) exchange_->put(action);
}

void MiniBatch::cancel(const Failure& failure) noexcept {
  auto* peers = pipeline_->peers();
  if (peers == nullptr) return;
  const auto where = [&] {
    if (!failure.action) return std::string();
    const auto info = describe(*failure.action, failure.error);
    return to_string(info.action) + " (stage " + std::to_string(info.action.stage) + ", micro-batch " +
           std::to_string(info.action.micro_batch) +
           (info.layer_name.empty() ? "" : ", layer '" + info.layer_name + "'") + ")";
  };
  try {
    std::rethrow_exception(failure.error);
  } catch (const ConnectionError& error) {
    const auto activity =
        failure.action ? exchange_->activity(pipeline_->worker_of(failure.action->stage)) : exchange_->activity();
    peers->fail(error, activity.awaits, failure.action ? where() : "the end of transfers between devices");
  } catch (...) {
    const auto place = where();
    peers->fail("rank " + std::to_string(peers->rank()) + " failed" + (place.empty() ? "" : " in " + place) + ": " +
                message_of(failure.error));
  }
}

// For errors outside of actions, which cancel() has not reported. REQUIRES: an exception is being handled.
void MiniBatch::report_failure() noexcept {
  if (auto* peers = pipeline_->peers()) {
    peers->fail("rank " + std::to_string(peers->rank()) + " failed in " + options_.call + ": " +
                message_of(std::current_exception()));
  }
}

// Over ranks, every rank gets the outputs of the last stage's.
Gathered MiniBatch::share_outputs() {
  auto* peers = pipeline_->peers();
  if (peers == nullptr) return gather_outputs();
  auto outputs = has_last_stage() ? gather_outputs() : Gathered();
  Parcel parcel;
  parcel.form = outputs.value.form();
  for (std::size_t k = 0; k < outputs.value.tensors().size(); ++k) {
    parcel.add(outputs.value.tensors()[k], outputs.wants_gradient[k]);
  }
  parcel = peers->share(Peers::Result::kOutput, pipeline_->rank_of(pipeline_->count() - 1), std::move(parcel));
  if (!has_last_stage()) {
    outputs.wants_gradient = std::move(parcel.wants_gradient);
    outputs.value = Value(parcel.form, std::move(parcel.tensors));
  }
  return outputs;
}

at::Tensor MiniBatch::share_loss() {
  at::Tensor loss;
  if (has_last_stage()) {
    const auto losses = std::exchange(losses_, {});
    use_on_this_thread(losses);
    loss = join_losses(losses, loss_.weights);
    if (has_replicas()) loss = sum_over_replicas(loss, *pipeline_->peers(), pipeline_->stages().back().device);
  }
  auto* peers = pipeline_->peers();
  if (peers == nullptr) return loss;
  Parcel parcel;
  parcel.add(std::move(loss), /*gradient_wanted=*/false);
  return peers->share(Peers::Result::kLoss, pipeline_->rank_of(pipeline_->count() - 1), std::move(parcel))
      .tensors.front();
}

void MiniBatch::begin_reduction() {
  last_backwards_.resize(pipeline_->count());
  for (const auto& actions : program_->schedule()) {
    for (const auto& action : actions) {
      if (action.kind == Kind::B || action.kind == Kind::W) last_backwards_[action.stage] = action;
    }
  }
  std::vector<std::vector<at::Tensor>> parameters;
  for (const auto& sinks : sinks_) parameters.push_back(sinks.parameters());
  present_gradients_.clear();
  for (const auto& of_stage : parameters) {
    for (const auto& parameter : of_stage) {
      const auto& gradient = parameter.grad();
      present_gradients_.emplace_back(gradient, version_of(gradient));
    }
  }
  reduction_ = std::make_unique<GradientReduction>(*pipeline_->peers(), std::move(parameters));
}

void MiniBatch::check_gradients_untouched() const {
  auto before = present_gradients_.begin();
  for (const auto& sinks : sinks_) {
    for (const auto& parameter : sinks.parameters()) {
      const auto& gradient = parameter.grad();
      const auto& [present, version] = *before++;
      if (gradient.is_same(present) && version_of(gradient) == version) continue;
      throw std::runtime_error(
          "[gpipe] a layer's backward has added to the .grad of a parameter itself, as reentrant checkpoints do, and "
          "replicas cannot sum that; use torch.utils.checkpoint with use_reentrant=False");
    }
  }
}

// Runs a B or a W. Hands the gradients of a stage's last one to the sum over replicas: those of a B as they come.
void MiniBatch::run_and_reduce(const Action& action, absl::FunctionRef<void()> run) {
  const int stage = action.stage;
  if (!reduction_ || action != last_backwards_[stage]) return run();
  auto& sums = sums_[stage];
  {
    const absl::Cleanup unwatch = [&] { sums.watch({}); };
    if (action.kind == Kind::B) {
      sums.watch(
          [&, stage](std::size_t parameter) { reduction_->add(stage, parameter, sums.take_unshared(parameter)); });
    }
    run();
  }
  reduction_->add_rest(stage, sums.take_unshared());
}

}  // namespace gpipe
