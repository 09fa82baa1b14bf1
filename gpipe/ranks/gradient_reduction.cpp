#include "gpipe/ranks/gradient_reduction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include "gpipe/base/checks.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

constexpr std::int64_t kBucketBytes = std::int64_t{4} << 20;

// A parameter's elements of a bucket, with the strides that PyTorch chooses for `.grad`. Advances `begin`.
at::Tensor next_view(const at::Tensor& values, std::int64_t& begin, const at::Tensor& parameter) {
  const auto own = values.narrow(0, std::exchange(begin, begin + parameter.numel()), parameter.numel());
  if (!parameter.is_non_overlapping_and_dense()) return own.view(parameter.sizes());
  return own.as_strided(parameter.sizes(), parameter.strides(), own.storage_offset());
}

}  // namespace

std::int64_t reduction_bytes(int replicas, std::int64_t gradients, std::int64_t largest) {
  return replicas == 1 ? 0 : std::min(gradients, kBucketBytes + largest);
}

GradientReduction::GradientReduction(Team& team, std::vector<std::vector<at::Tensor>> parameters)
    : team_(team), parameters_(std::move(parameters)), buckets_(parameters_.size()), is_sent_(parameters_.size()) {
  for (std::size_t s = 0; s < parameters_.size(); ++s) {
    const auto& of_stage = parameters_[s];
    is_sent_[s] = of_stage.empty();
    for (auto p = of_stage.size(); p-- > 0;) {
      team.sums(of_stage[p].device());  // which may connect
      const bool is_like_last = p + 1 < of_stage.size() && of_stage[p].dtype() == of_stage[p + 1].dtype();
      const auto item = static_cast<std::int64_t>(of_stage[p].element_size());
      if (!is_like_last || buckets_[s].back().elements * item >= kBucketBytes) buckets_[s].emplace_back();
      buckets_[s].back().parameters.push_back(p);
      buckets_[s].back().elements += of_stage[p].numel();
    }
  }
}

void GradientReduction::send(int stage, Gradients gradients) {
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_[stage]) {
    const auto options = parameters_[stage][bucket.parameters.front()].options().requires_grad(false);
    const bool on_cpu = team_.sums(options.device()).getBackendName() == "gloo";
    const auto count = std::ssize(bucket.parameters);
    bucket.values = at::zeros({bucket.elements + count}, on_cpu ? options.device(at::kCPU) : options);
    const auto flags = bucket.values.narrow(0, bucket.elements, count).fill_(1);
    std::int64_t begin = 0;
    for (std::int64_t k = 0; k < count; ++k) {
      const auto gradient = std::move(gradients[bucket.parameters[k]]);
      const auto own = next_view(bucket.values, begin, parameters_[stage][bucket.parameters[k]]);
      if (gradient.defined() && gradient.layout() != at::kStrided) {
        refuse_argument(
            "a parameter has a sparse gradient, which replicas cannot sum; use a layer without sparse gradients");
      }
      gradient.defined() ? own.copy_(gradient) : flags[k].zero_();
      bucket.lacks_some = bucket.lacks_some || !gradient.defined();
    }
    bucket.ready = record_event(bucket.values.device());
  }
  MutexLock lock(mutex_);
  is_sent_[stage] = 1;
  if (!team_.has_device_wires()) start();
}

void GradientReduction::start() {
  for (auto s = is_sent_.size(); s-- > 0 && is_sent_[s] != 0;) {
    for (auto& [parameters, elements, values, lacks_some, ready, sum] : buckets_[s]) {
      if (sum) continue;
      wait(ready, values.device());
      std::vector<at::Tensor> summed{values.is_complex() ? at::view_as_real(values) : values};
      sum = team_.sums(values.device()).allreduce(summed);
    }
  }
}

std::vector<Gradients> GradientReduction::take() {
  const at::NoGradGuard no_grad;
  {
    MutexLock lock(mutex_);
    start();
  }
  std::vector<Gradients> all(parameters_.size());
  for (std::size_t s = parameters_.size(); s-- > 0;) {
    all[s].resize(parameters_[s].size());
    for (auto& bucket : buckets_[s]) {
      const auto values = std::exchange(bucket.values, {});
      const auto sum_of_bucket = std::exchange(bucket.sum, {});  // which holds the memory of the values, too
      team_.await(*sum_of_bucket, values.is_cpu());
      use_on_current_stream(values);
      at::Tensor flags;  // the host waits for a device only if it does not know them
      if (bucket.lacks_some) flags = values.narrow(0, bucket.elements, std::ssize(bucket.parameters)).ne(0).cpu();
      std::int64_t begin = 0;
      for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
        const auto& parameter = parameters_[s][bucket.parameters[k]];
        const auto sum = next_view(values, begin, parameter);
        if (flags.defined() && !flags.const_data_ptr<bool>()[k]) continue;
        all[s][bucket.parameters[k]] = sum.to(parameter.device(), /*non_blocking=*/false, /*copy=*/true);
      }
    }
  }
  return all;
}

}  // namespace gpipe
