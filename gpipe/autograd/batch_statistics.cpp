#include "gpipe/autograd/batch_statistics.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_ops.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/var.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "gpipe/autograd/stage.h"
#include "gpipe/runtime/transfer.h"

namespace gpipe {
namespace {

thread_local BatchStatistics* current_statistics = nullptr;

// Runs for every layer, because each runs inside a RandomScope, which includes this dispatch key.
at::Tensor batch_norm(c10::DispatchKeySet keys, const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum, double eps,
                      bool cudnn_enabled) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::DeferredInit);
  auto* statistics = BatchStatistics::current();
  const bool defer = statistics != nullptr && training && running_mean && running_mean->defined();
  if (defer) statistics->add(input, *running_mean, *running_var, momentum);
  return at::_ops::batch_norm::redispatch(below, input, weight, bias, defer ? std::nullopt : running_mean,
                                          defer ? std::nullopt : running_var, training, momentum, eps, cudnn_enabled);
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) { library.impl("batch_norm", TORCH_FN(batch_norm)); }

// Does not advance version counters; neither does batch norm.
void update(const at::Tensor& running, const at::Tensor& value, double momentum) {
  auto data = running.variable_data();
  data.copy_(data.to(at::kDouble).mul_(1 - momentum).add_(value.to(data.device()), momentum));
}

}  // namespace

BatchStatistics::Scope::Scope(BatchStatistics* statistics) : previous_(std::exchange(current_statistics, statistics)) {}

BatchStatistics::Scope::~Scope() { current_statistics = previous_; }

BatchStatistics* BatchStatistics::current() { return current_statistics; }

void BatchStatistics::add(const at::Tensor& input, const at::Tensor& running_mean, const at::Tensor& running_var,
                          double momentum) {
  at::NoGradGuard no_grad;
  auto entry = std::find_if(entries_.begin(), entries_.end(),
                            [&](const Entry& known) { return known.running_mean.is_same(running_mean); });
  if (entry == entries_.end()) entry = entries_.insert(entry, Entry{running_mean, running_var, momentum});
  ++entry->calls;
  if (input.numel() == 0) return;

  std::vector<std::int64_t> all_but_channels = {0};
  for (std::int64_t d = 2; d < input.dim(); ++d) all_but_channels.push_back(d);
  const auto values = input.detach();
  const auto count = static_cast<double>(values.numel() / values.size(1));
  const auto mean = at::mean(values, all_but_channels, /*keepdim=*/false, at::kDouble);
  // at::var() computes in the type of its input.
  const bool is_reduced = at::isReducedFloatingType(values.scalar_type());
  const auto deviations =
      at::var(is_reduced ? values.to(at::kFloat) : values, all_but_channels, /*correction=*/0.0).to(at::kDouble) *
      count;
  if (entry->count == 0) {
    entry->mean = mean;
    entry->deviations = deviations;
    entry->count = count;
    return;
  }
  const double joined = entry->count + count;
  const auto apart = mean - entry->mean;
  entry->mean.add_(apart, count / joined);
  entry->deviations.add_(deviations).add_(apart.square(), entry->count * count / joined);
  entry->count = joined;
}

void BatchStatistics::commit(const Stage& stage) {
  at::NoGradGuard no_grad;
  for (const auto& entry : entries_) {
    if (entry.count < 2) continue;
    use_on_current_stream(entry.mean);
    use_on_current_stream(entry.deviations);
    update(entry.running_mean, entry.mean, entry.momentum);
    update(entry.running_var, entry.deviations / (entry.count - 1), entry.momentum);
  }
  for (const auto& layer : stage.layers) {
    for (const auto& module : layer->module()->modules()) {
      const auto buffers = module->named_buffers(/*recurse=*/false);
      const auto* running_mean = buffers.find("running_mean");
      const auto* tracked = buffers.find("num_batches_tracked");
      if (running_mean == nullptr || tracked == nullptr) continue;
      for (const auto& entry : entries_) {
        if (entry.running_mean.is_same(*running_mean)) tracked->variable_data().sub_(entry.calls - 1);
      }
    }
  }
  entries_.clear();
}

}  // namespace gpipe
