#include "gpipe/autograd/batch_statistics.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_ops.h>
#include <ATen/ops/instance_norm_ops.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include "gpipe/autograd/stage.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/torch_internals.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

thread_local BatchStatistics* current_statistics = nullptr;

// PyTorch refuses one without the other.
bool have_values(const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var) {
  return running_mean && running_mean->defined() && running_var && running_var->defined();
}

// Runs for every layer, because each runs inside a RandomScope, which includes this dispatch key.
at::Tensor batch_norm(c10::DispatchKeySet keys, const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum, double eps,
                      bool cudnn_enabled) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptingKey);
  auto* statistics = current_statistics;
  const bool updates = training && have_values(running_mean, running_var);
  const bool defer = statistics != nullptr && updates;
  if (updates) {
    StageState::before_write(*running_mean);
    StageState::before_write(*running_var);
  }
  if (defer) statistics->add(input, *running_mean, *running_var, momentum);
  return at::_ops::batch_norm::redispatch(below, input, weight, bias, defer ? std::nullopt : running_mean,
                                          defer ? std::nullopt : running_var, training, momentum, eps, cudnn_enabled);
}

at::Tensor instance_norm(c10::DispatchKeySet keys, const at::Tensor& input, const std::optional<at::Tensor>& weight,
                         const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                         const std::optional<at::Tensor>& running_var, bool use_input_stats, double momentum,
                         double eps, bool cudnn_enabled) {
  if (current_statistics != nullptr && use_input_stats && have_values(running_mean, running_var)) {
    throw_error(
        "deferred_batch_norm does not defer the running statistics of an instance norm; make it with "
        "track_running_stats=False, or turn deferred_batch_norm off");
  }
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptingKey);
  const BatchStatistics::Scope inner(nullptr);  // it calls batch norm
  return at::_ops::instance_norm::redispatch(below, input, weight, bias, running_mean, running_var, use_input_stats,
                                             momentum, eps, cudnn_enabled);
}

// Does not advance version counters; neither does batch norm.
void update(const at::Tensor& running, const at::Tensor& value, double momentum) {
  auto data = running.variable_data();
  data.copy_(data.to(at::kDouble).mul_(1 - momentum).add_(value.to(data.device()), momentum));
}

}  // namespace

void register_batch_norm(torch::Library& library) {
  library.impl("batch_norm", TORCH_FN(batch_norm));
  library.impl("instance_norm", TORCH_FN(instance_norm));
}

BatchStatistics::Scope::Scope(BatchStatistics* statistics) : previous_(std::exchange(current_statistics, statistics)) {
  if (statistics != nullptr) statistics->begin_micro_batch();
}

BatchStatistics::Scope::~Scope() { current_statistics = previous_; }

void BatchStatistics::add(const at::Tensor& input, const at::Tensor& running_mean, const at::Tensor& running_var,
                          double momentum) {
  at::NoGradGuard no_grad;
  auto& entry = next_entry(running_mean, running_var, momentum);
  ++entry.calls;
  if (input.numel() == 0) return;

  std::vector<std::int64_t> all_but_channels = {0};
  for (std::int64_t d = 2; d < input.dim(); ++d) all_but_channels.push_back(d);
  const bool is_reduced = at::isReducedFloatingType(input.scalar_type());
  const auto values = is_reduced ? input.detach().to(at::kFloat) : input.detach();
  const auto count = static_cast<double>(values.numel() / values.size(1));
  // A rounded mean, and sums of what is left. at::var() is exact too, but takes several times as long on the CPU.
  const auto center = at::mean(values, all_but_channels, /*keepdim=*/true);
  auto apart = values - center;
  const auto rest = at::mean(apart, all_but_channels).to(at::kDouble);
  const auto squares = at::sum(apart.square_(), all_but_channels).to(at::kDouble);
  merge(entry, count, center.flatten().to(at::kDouble) + rest, (squares - rest.square() * count).clamp_min_(0));
}

void BatchStatistics::begin_micro_batch() {
  for (auto& entry : entries_) entry.is_next = true;
}

BatchStatistics::Entry& BatchStatistics::next_entry(const at::Tensor& running_mean, const at::Tensor& running_var,
                                                    double momentum) {
  for (auto& known : entries_) {
    if (known.running_mean.is_same(running_mean) && std::exchange(known.is_next, false)) return known;
  }
  return entries_.emplace_back(Entry{running_mean, running_var, momentum});
}

void BatchStatistics::merge(Entry& entry, double count, const at::Tensor& mean, const at::Tensor& deviations) {
  if (entry.count == 0) {
    entry.mean = mean;
    entry.deviations = deviations;
    entry.count = count;
    return;
  }
  const double joined = entry.count + count;
  const auto apart = mean - entry.mean;
  entry.mean.add_(apart, count / joined);
  entry.deviations.add_(deviations);
  entry.deviations.add_(apart.square(), entry.count * count / joined);
  entry.count = joined;
}

std::vector<at::Tensor> BatchStatistics::to_tensors(const std::vector<at::Tensor>& buffers) const {
  std::vector<at::Tensor> tensors;
  for (const auto& entry : entries_) {
    const auto mean = index_of(entry.running_mean, buffers);
    const auto var = index_of(entry.running_var, buffers);
    if (entry.count == 0 || mean == buffers.size() || var == buffers.size()) continue;
    use_on_current_stream(entry.mean);
    use_on_current_stream(entry.deviations);
    tensors.push_back(
        at::tensor({static_cast<double>(mean), static_cast<double>(var), entry.momentum, entry.count}, at::kDouble));
    tensors.push_back(entry.mean.to(at::kCPU));
    tensors.push_back(entry.deviations.to(at::kCPU));
  }
  return tensors;
}

void BatchStatistics::join(const std::vector<at::Tensor>& buffers,
                           const std::vector<std::vector<at::Tensor>>& of_others) {
  at::NoGradGuard no_grad;
  for (auto& entry : entries_) {
    const bool is_sent = index_of(entry.running_mean, buffers) != buffers.size() &&
                         index_of(entry.running_var, buffers) != buffers.size();
    if (is_sent) entry.count = 0;
  }
  for (const auto& tensors : of_others) {
    begin_micro_batch();
    for (std::size_t k = 0; k < tensors.size(); k += 3) {
      const auto number = [&](int i) { return tensors[k][i].item<double>(); };
      const auto& mean = buffers.at(static_cast<std::size_t>(number(0)));
      auto& entry = next_entry(mean, buffers.at(static_cast<std::size_t>(number(1))), number(2));
      merge(entry, number(3), tensors.at(k + 1).to(mean.device(), at::kDouble, false, /*copy=*/true),
            tensors.at(k + 2).to(mean.device(), at::kDouble, false, /*copy=*/true));
    }
  }
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
