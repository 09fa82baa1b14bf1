#include "gpipe/ranks/gradient_reduction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>

#include <string>
#include <utility>

#include "gpipe/ranks/parcel_message.h"
#include "gpipe/tensors/intraop.h"

namespace gpipe {
namespace {

constexpr char kWaits[] = "the gradients of another replica";

// The gradients of a share: undefined where the whole gradient is.
Outgoing to_message(const std::vector<GradientPiece>& share, const Gradients& gradients, const RankTeam& team) {
  Parcel parcel;
  for (const auto& piece : share) {
    const auto& gradient = gradients[piece.parameter];
    parcel.add(gradient.defined() ? piece_of(gradient, piece) : at::Tensor(), /*gradient_wanted=*/false);
  }
  return to_message({std::move(parcel)}, team.rank(), team.codec());
}

// Sums one piece in the order of replicas, into the memory of the `own` part if that is defined. Writes to the others too.
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

}  // namespace

GradientReduction::GradientReduction(RankTeam& team, std::vector<std::vector<at::Tensor>> parameters)
    : team_(team), call_(team.calls()), stages_(parameters.size()), is_sent_(parameters.size()) {
  using Kind = RankTeam::Gradient;
  for (int s = 0; s < static_cast<int>(stages_.size()); ++s) {
    auto& stage = stages_[s];
    stage.parameters = std::move(parameters[s]);
    for (const auto& parameter : stage.parameters) {
      stage.present.emplace_back(parameter.grad(), parameter.grad());
    }
    stage.gradients.resize(stage.parameters.size());
    stage.buckets = cut_into_buckets(stage.parameters, team.replicas(), kBucketBytes);
    stage.wires.resize(team.replicas());
    const auto count = stage.buckets.size();
    for (int r = 0; r < team.replicas() && count != 0; ++r) {
      if (r == team.replica()) continue;
      const auto expect = [&](Kind kind) {
        auto& wire = team.gradient_receiver(kind, s, r);
        auto& layouts = team.last_gradient_layouts(kind, s, r, team.replica(), count);
        std::vector<LastLayout*> messages;
        for (std::size_t b = 0; b < count; ++b) messages.push_back(&layouts[b]);
        wire.expect(std::move(messages));
        return &wire;
      };
      stage.wires[r] = {&team.gradient_sender(Kind::kPart, s, r),
                        &team.gradient_sender(Kind::kSum, s, r),
                        expect(Kind::kPart),
                        expect(Kind::kSum),
                        &team.last_gradient_layouts(Kind::kPart, s, team.replica(), r, count),
                        &team.last_gradient_layouts(Kind::kSum, s, team.replica(), r, count)};
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

void GradientReduction::send(int stage_index, Gradients gradients) {
  auto& stage = stages_[stage_index];
  for (std::size_t p = 0; p < gradients.size(); ++p) {
    if (gradients[p].defined()) stage.gradients[p] = in_parameters_order(std::move(gradients[p]), stage.parameters[p]);
  }
  for (std::size_t number = 0; number < stage.buckets.size(); ++number) {
    for (int r = 0; r < team_.replicas(); ++r) {
      if (r == team_.replica()) continue;
      const auto& wires = stage.wires[r];
      auto message = to_message(stage.buckets[number].shares[r], stage.gradients, team_);
      try {
        wires.send_part->send((*wires.sent_parts)[number], call_, std::move(message));
      } catch (const ConnectionError& error) {
        team_.fail(error, team_.counterpart(r), kWaits);
        throw;
      }
    }
  }
  {
    MutexLock lock(mutex_);
    is_sent_[stage_index] = true;
  }
  changed_.notify_all();
}

// Returns false if the backward has ended before.
bool GradientReduction::await_stage(int stage) {
  MutexLock lock(mutex_);
  while (!is_sent_[stage] && !ended_) changed_.wait(mutex_);
  return is_sent_[stage];
}

// The thread.
void GradientReduction::run() {
  set_intraop_threads_of_this_thread(1);
  const at::NoGradGuard no_grad;
  try {
    sum();
  } catch (const ConnectionError& error) {
    error_ = std::current_exception();
    team_.fail(error, other_, kWaits);
  } catch (const std::exception& error) {
    error_ = std::current_exception();
    team_.fail("rank " + std::to_string(team_.rank()) + " failed while it summed gradients: " + error.what());
  }
  team_.set_awaited_for_gradients(-1);
}

void GradientReduction::sum() {
  Summed summed;
  for (int stage = static_cast<int>(stages_.size()) - 1; stage >= 0; --stage) {
    const auto& buckets = stages_[stage].buckets;
    if (!buckets.empty() && !await_stage(stage)) return;
    for (std::size_t number = 0; number < buckets.size(); ++number) {
      sum_share(stage, buckets[number], number);
      take_sums(std::exchange(summed, Summed{stage, &buckets[number]}));
    }
  }
  take_sums(summed);
  await_deliveries();
}

Parcel GradientReduction::receive(WireReceiver& wire, int replica) {
  other_ = team_.counterpart(replica);
  team_.set_awaited_for_gradients(other_);
  auto message = wire.receive(call_);
  team_.set_awaited_for_gradients(-1);
  return std::move(to_parcels(std::move(message)).front());
}

at::Tensor& GradientReduction::gradient_of(OfStage& stage, std::size_t parameter) {
  auto& gradient = stage.gradients[parameter];
  if (!gradient.defined()) {
    gradient = in_parameters_order(at::empty_like(stage.parameters[parameter]), stage.parameters[parameter]);
  }
  return gradient;
}

void GradientReduction::write(OfStage& stage, const std::vector<GradientPiece>& pieces, const Parcel& values) {
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    const auto& value = values.tensors.at(k);
    if (!value.defined()) continue;
    const auto piece = piece_of(gradient_of(stage, pieces[k].parameter), pieces[k]);
    if (piece.const_data_ptr() != value.const_data_ptr()) piece.copy_(value);
  }
}

// Sums this replica's share of a bucket, and sends the sum.
void GradientReduction::sum_share(int stage_index, const GradientBucket& bucket, std::size_t number) {
  auto& stage = stages_[stage_index];
  const int own = team_.replica();
  const auto& share = bucket.shares[own];
  std::vector<Parcel> parts(team_.replicas());
  for (int r = 0; r < team_.replicas(); ++r) {
    if (r != own) parts[r] = receive(*stage.wires[r].receive_part, r);
  }
  Parcel sums;
  for (std::size_t k = 0; k < share.size(); ++k) {
    const auto& gradient = stage.gradients[share[k].parameter];
    std::vector<at::Tensor> of_replicas;
    for (int r = 0; r < team_.replicas(); ++r) {
      if (r != own) {
        of_replicas.push_back(parts[r].tensors.at(k));
      } else {
        of_replicas.push_back(gradient.defined() ? piece_of(gradient, share[k]) : at::Tensor());
      }
    }
    sums.add(sum_of(of_replicas, own), /*gradient_wanted=*/false);
  }
  for (int r = 0; r < team_.replicas(); ++r) {
    if (r == own) continue;
    const auto& wires = stage.wires[r];
    other_ = team_.counterpart(r);
    wires.send_sum->send((*wires.sent_sums)[number], call_, to_message({sums}, team_.rank(), team_.codec()));
  }
  write(stage, share, sums);
}

// Takes the other replicas' sums of a bucket.
void GradientReduction::take_sums(const Summed& summed) {
  if (summed.bucket == nullptr) return;
  auto& stage = stages_[summed.stage];
  for (int r = 0; r < team_.replicas(); ++r) {
    if (r != team_.replica()) write(stage, summed.bucket->shares[r], receive(*stage.wires[r].receive_sum, r));
  }
}

// The sums that are sent lie in the gradients, which the caller may change later.
void GradientReduction::await_deliveries() {
  for (const auto& stage : stages_) {
    for (int r = 0; r < team_.replicas() && !stage.buckets.empty(); ++r) {
      if (r == team_.replica()) continue;
      other_ = team_.counterpart(r);
      team_.set_awaited_for_gradients(other_);
      stage.wires[r].send_sum->drain(team_.timeout());
      team_.set_awaited_for_gradients(-1);
    }
  }
}

void GradientReduction::check_untouched() const {
  for (const auto& stage : stages_) {
    for (std::size_t p = 0; p < stage.parameters.size(); ++p) {
      const auto& gradient = stage.parameters[p].grad();
      const auto& [present, version] = stage.present[p];
      if (gradient.is_same(present) && !version.changed()) continue;
      throw std::runtime_error(
          "[gpipe] a layer's backward has added to the .grad of a parameter itself, as reentrant checkpoints do, and "
          "replicas cannot sum that; use torch.utils.checkpoint with use_reentrant=False");
    }
  }
}

std::vector<Gradients> GradientReduction::take() {
  if (thread_.joinable()) team_.while_polling([&] { thread_.join(); });
  if (error_) team_.rethrow(error_);
  check_untouched();
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
