#include "gpipe/ranks/gradient_reduction.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "gpipe/base/checks.h"
#include "gpipe/options.h"
#include "gpipe/runtime/exit.h"

namespace gpipe {
namespace {

constexpr char kWaits[] = "the gradients of another replica";
constexpr std::int64_t kBucketBytes = std::int64_t{4} << 20;

GradientBucket cut_into_shares(const std::vector<std::size_t>& bucket, const std::vector<at::Tensor>& parameters,
                               int replicas) {
  std::int64_t total = 0;
  for (const auto p : bucket) total += parameters[p].numel();
  GradientBucket shares(replicas);
  std::int64_t before = 0;  // elements of earlier parameters
  for (const auto p : bucket) {
    const auto size = parameters[p].numel();
    for (int r = 0; r < replicas; ++r) {
      const auto begin = std::max<std::int64_t>(total * r / replicas - before, 0);
      const auto end = std::min(total * (r + 1) / replicas - before, size);
      if (begin < end) shares[r].push_back({p, begin, end});
    }
    before += size;
  }
  return shares;
}

// Returns a gradient on the CPU with the strides that PyTorch chooses for `.grad`, which are alike on all replicas.
at::Tensor in_parameters_order(at::Tensor gradient, const at::Tensor& parameter) {
  require(gradient.layout() == at::kStrided,
          "[gpipe] a parameter has a sparse gradient, which replicas cannot sum; use a layer without sparse gradients");
  using namespace torch::autograd::utils;
  if (!obeys_layout_contract(gradient, parameter)) gradient = clone_obey_contract(gradient, parameter);
  return gradient.to(at::kCPU);
}

// The memory of a piece. REQUIRES: `gradient` lies as in_parameters_order(), or is undefined.
at::Tensor piece_of(const at::Tensor& gradient, const GradientPiece& piece) {
  if (!gradient.defined()) return gradient;
  return gradient.as_strided({piece.end - piece.begin}, {1}, gradient.storage_offset() + piece.begin);
}

// Sums a piece in the order of replicas, into the `own` part if that is defined. Writes to the others too.
at::Tensor sum_of(const std::vector<at::Tensor>& parts, int own) {
  at::Tensor sum;
  for (int r = 0; r < static_cast<int>(parts.size()); ++r) {
    auto part = parts[r];
    if (!part.defined()) continue;
    if (!sum.defined()) {
      sum = part;
    } else if (r == own) {
      sum = at::add_out(part, sum, part);
    } else {
      sum.add_(part);
    }
  }
  return sum;
}

// Returns the buckets of a stage's parameters: in reverse order, and of at least kBucketBytes each, except the last.
// Depends on the parameters' sizes only. (PyTorch Distributed, Li et al., arXiv:2006.15704, section 3.2.3)
std::vector<GradientBucket> cut_into_buckets(const std::vector<at::Tensor>& parameters, int replicas) {
  std::vector<std::vector<std::size_t>> buckets;  // indices of parameters
  std::int64_t present = kBucketBytes;            // bytes in the last bucket
  for (auto p = parameters.size(); p-- > 0;) {
    if (present >= kBucketBytes) {
      buckets.emplace_back();
      present = 0;
    }
    buckets.back().push_back(p);
    present += static_cast<std::int64_t>(parameters[p].nbytes());
  }
  std::vector<GradientBucket> cut;
  for (const auto& bucket : buckets) cut.push_back(cut_into_shares(bucket, parameters, replicas));
  return cut;
}

}  // namespace

std::int64_t reduction_bytes(int replicas, std::int64_t gradients, std::int64_t largest) {
  const auto share_of = [&](std::int64_t bytes) { return (bytes + replicas - 1) / replicas; };
  const auto message = share_of(std::min(gradients, kBucketBytes + largest));
  const auto posted = static_cast<std::int64_t>(most_posted(message));
  // From each other replica come parts on one wire and sums on another. One message of each is in use.
  return 2 * (replicas - 1) * std::min(share_of(gradients), posted + message);
}

GradientReduction::GradientReduction(Team& team, std::vector<std::vector<at::Tensor>> parameters)
    : team_(team),
      call_(team.calls()),
      stages_(parameters.size()),
      awaited_(team.awaited_for_gradients()),
      is_sent_(parameters.size()) {
  for (int s = 0; s < std::ssize(stages_); ++s) {
    auto& stage = stages_[s];
    stage.parameters = std::move(parameters[s]);
    stage.gradients.resize(stage.parameters.size());
    stage.buckets = cut_into_buckets(stage.parameters, team.replicas());
    const auto count = stage.buckets.size();
    for (int r = 0; r < team.replicas() && count != 0; ++r) {
      if (r == team.replica()) continue;
      stage.parts.push_back(team.gradient_wires(Team::Gradient::kPart, s, r, count));
      stage.sums.push_back(team.gradient_wires(Team::Gradient::kSum, s, r, count));
    }
  }
  thread_ = std::thread([this] { run(); });
}

GradientReduction::~GradientReduction() {
  {
    MutexLock lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Outgoing GradientReduction::to_message(const std::vector<at::Tensor>& pieces) const {
  Parcel parcel;
  for (const auto& piece : pieces) parcel.add(piece, /*gradient_wanted=*/false);
  return gpipe::to_message({std::move(parcel)}, team_.rank(), team_.codec());
}

void GradientReduction::send(int stage_index, Gradients gradients) {
  auto& stage = stages_[stage_index];
  for (std::size_t p = 0; p < gradients.size(); ++p) {
    if (gradients[p].defined()) stage.gradients[p] = in_parameters_order(std::move(gradients[p]), stage.parameters[p]);
  }
  for (std::size_t number = 0; number < stage.buckets.size(); ++number) {
    for (const auto& wires : stage.parts) {
      std::vector<at::Tensor> pieces;
      for (const auto& piece : stage.buckets[number][wires.replica]) {
        pieces.push_back(piece_of(stage.gradients[piece.parameter], piece));
      }
      try {
        wires.sender->send((*wires.layouts)[number], call_, to_message(pieces));
      } catch (const ConnectionError& error) {
        team_.fail(error, team_.counterpart(wires.replica), kWaits);
        throw;
      }
    }
  }
  MutexLock lock(mutex_);
  is_sent_[stage_index] = true;
  changed_.notify_all();
}

void GradientReduction::run() {
  const ExitGuard guard;
  set_intraop_threads_of_this_thread(1);
  const at::NoGradGuard no_grad;
  try {
    sum();
  } catch (const ConnectionError& error) {
    error_ = std::current_exception();
    team_.fail(error, awaited_, kWaits);
  } catch (const std::exception& error) {
    error_ = std::current_exception();
    team_.fail("rank " + std::to_string(team_.rank()) + " failed while it summed gradients: " + error.what());
  }
  awaited_ = -1;
  MutexLock lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

void GradientReduction::sum() {
  OfStage* last = nullptr;  // the stage and the number of the bucket whose share was summed last
  std::size_t last_number = 0;
  for (auto s = stages_.size(); s-- > 0;) {
    auto& stage = stages_[s];
    if (stage.buckets.empty()) continue;
    {
      MutexLock lock(mutex_);
      while (!is_sent_[s] && !ended_) changed_.wait(mutex_);
      if (!is_sent_[s]) return;  // the backward has ended before
    }
    for (std::size_t number = 0; number < stage.buckets.size(); ++number) {
      sum_share(stage, number);
      if (last != nullptr) take_sums(*last, last_number);
      last = &stage;
      last_number = number;
    }
  }
  if (last != nullptr) take_sums(*last, last_number);
  // The sums that are sent lie in the gradients, which the caller may change later.
  for (const auto& stage : stages_) {
    for (const auto& wires : stage.sums) {
      awaited_ = team_.counterpart(wires.replica);
      wires.sender->drain(team_.timeout());
    }
  }
}

Parcel GradientReduction::receive(const Team::GradientWires& wires) {
  awaited_ = team_.counterpart(wires.replica);
  auto message = wires.receiver->receive(call_);
  awaited_ = -1;
  return std::move(to_parcels(std::move(message)).front());
}

void GradientReduction::write(OfStage& stage, const std::vector<GradientPiece>& pieces, const Parcel& values) {
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    const auto& value = values.tensors.at(k);
    if (!value.defined()) continue;
    const auto& parameter = stage.parameters[pieces[k].parameter];
    auto& gradient = stage.gradients[pieces[k].parameter];
    if (!gradient.defined()) gradient = in_parameters_order(at::empty_like(parameter, at::kCPU), parameter);
    const auto piece = piece_of(gradient, pieces[k]);
    if (piece.const_data_ptr() != value.const_data_ptr()) piece.copy_(value);
  }
}

void GradientReduction::sum_share(OfStage& stage, std::size_t number) {
  const int own = team_.replica();
  const auto& share = stage.buckets[number][own];
  std::vector<std::vector<at::Tensor>> parts(share.size(), std::vector<at::Tensor>(team_.replicas()));
  for (const auto& wires : stage.parts) {
    const auto received = receive(wires);
    for (std::size_t k = 0; k < share.size(); ++k) parts[k][wires.replica] = received.tensors.at(k);
  }
  Parcel sums;
  for (std::size_t k = 0; k < share.size(); ++k) {
    parts[k][own] = piece_of(stage.gradients[share[k].parameter], share[k]);
    sums.add(sum_of(parts[k], own), /*gradient_wanted=*/false);
  }
  for (const auto& wires : stage.sums) {
    awaited_ = team_.counterpart(wires.replica);
    wires.sender->send((*wires.layouts)[number], call_, to_message(sums.tensors));
  }
  awaited_ = -1;
  write(stage, share, sums);
}

void GradientReduction::take_sums(OfStage& stage, std::size_t number) {
  for (const auto& wires : stage.sums) write(stage, stage.buckets[number][wires.replica], receive(wires));
}

void GradientReduction::await_thread() {
  const auto is_done = [&] {
    MutexLock lock(mutex_);
    if (!done_) changed_.wait_until(mutex_, std::chrono::steady_clock::now() + kPollPeriod);
    return done_;
  };
  while (!is_done()) {
    if (team_.poll()) team_.poll()();
  }
  thread_.join();
}

std::vector<Gradients> GradientReduction::take() {
  if (thread_.joinable()) await_thread();
  if (error_) team_.rethrow(error_);
  std::vector<Gradients> all;
  for (auto& stage : stages_) {
    for (std::size_t p = 0; p < stage.parameters.size(); ++p) {
      auto& gradient = stage.gradients[p];
      if (gradient.defined()) gradient = gradient.to(stage.parameters[p].device());
    }
    all.push_back(std::move(stage.gradients));
  }
  return all;
}

}  // namespace gpipe
