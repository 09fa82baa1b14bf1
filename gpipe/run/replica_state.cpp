#include "gpipe/run/replica_state.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/tensors/sample_hash.h"

namespace gpipe {
namespace {

// Gives the tensors the values that they have in the first replica. Undefined ones of `sent` stay as they are.
void take_values(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& sent, Team& team) {
  at::NoGradGuard no_grad;
  if (tensors.empty()) return;
  Parcel parcel;
  for (const auto& tensor : sent) {
    // An expanded tensor cannot be written, so it is not sent.
    const bool is_sent = tensor.defined() && at::has_internal_overlap(tensor) != at::MemOverlap::Yes;
    parcel.add(is_sent ? tensor.detach() : at::Tensor(), /*gradient_wanted=*/false);
  }
  parcel = team.broadcast(Team::Group::kCounterparts, team.counterpart(0), std::move(parcel));
  if (team.replica() == 0) return;
  if (parcel.tensors.size() != tensors.size()) {
    throw std::runtime_error("[gpipe] the layers of this replica have " + std::to_string(tensors.size()) +
                             " parameters and buffers to make equal, but those of the first replica have " +
                             std::to_string(parcel.tensors.size()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& value = parcel.tensors[i];
    if (!value.defined()) continue;
    if (value.sizes() == tensors[i].sizes()) {
      tensors[i].variable_data().copy_(value);
    } else {
      tensors[i].set_data(value.to(tensors[i].device()));  // a buffer whose shape follows the data
    }
  }
}

}  // namespace

void take_state_of_first_replica(Pipeline& pipeline) {
  std::vector<at::Tensor> tensors;
  for (const auto& stage : pipeline.stages()) {
    for (const auto& list : {stage.parameters(), stage.buffers()}) {
      tensors.insert(tensors.end(), list.begin(), list.end());
    }
  }
  take_values(tensors, tensors, pipeline.team());
}

void take_buffers_of_first_replica(Pipeline& pipeline) {
  std::vector<at::Tensor> buffers;
  std::vector<at::Tensor> sent;
  for (const auto& stage : pipeline.stages()) {
    for (const auto& buffer : stage.buffers()) {
      buffers.push_back(buffer);
      sent.push_back(stage.state.may_change(buffer) ? buffer : at::Tensor());
    }
  }
  take_values(buffers, sent, pipeline.team());
}

void merge_over_replicas(std::vector<BatchStatistics>& statistics, Pipeline& pipeline) {
  for (std::size_t s = 0; s < statistics.size(); ++s) {
    const auto buffers = pipeline.stages()[s].buffers();
    if (buffers.empty()) continue;
    Parcel parcel;
    for (auto& tensor : statistics[s].to_tensors(buffers)) parcel.add(std::move(tensor), /*gradient_wanted=*/false);
    std::vector<Gradients> of_replicas;
    for (auto& each : pipeline.team().all_gather(std::move(parcel))) of_replicas.push_back(std::move(each.tensors));
    statistics[s].join(buffers, of_replicas);
  }
}

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

std::string describe_trained(const std::vector<ParameterSinks>& stages) {
  std::size_t count = 0;
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  std::vector<at::Tensor> own;
  for (const auto& sinks : stages) {
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

}  // namespace gpipe
