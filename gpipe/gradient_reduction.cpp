#include "gpipe/gradient_reduction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>

#include <string>
#include <utility>

#include "gpipe/ranks/parcel_message.h"
#include "gpipe/runtime/intraop.h"

namespace gpipe {
namespace {

constexpr char kWaits[] = "the gradients of another replica";

// The gradients of a share: undefined where the whole gradient is.
Outgoing to_message(const std::vector<GradientPiece>& share, const Gradients& gradients, const Peers& peers) {
  Parcel parcel;
  for (const auto& piece : share) {
    const auto& gradient = gradients[piece.parameter];
    parcel.add(gradient.defined() ? piece_of(gradient, piece) : at::Tensor(), /*gradient_wanted=*/false);
  }
  return to_message({std::move(parcel)}, peers.rank(), peers.codec());
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

GradientReduction::GradientReduction(Peers& peers, std::vector<std::vector<at::Tensor>> parameters)
    : peers_(peers), call_(peers.calls()), stages_(parameters.size()) {
  using Kind = Peers::Gradient;
  for (int s = 0; s < static_cast<int>(stages_.size()); ++s) {
    auto& stage = stages_[s];
    stage.parameters = std::move(parameters[s]);
    stage.gradients.resize(stage.parameters.size());
    stage.is_here.resize(stage.parameters.size());
    stage.buckets = cut_into_buckets(stage.parameters, peers.replicas(), kBucketBytes);
    stage.wires.resize(peers.replicas());
    const auto count = stage.buckets.size();
    for (int r = 0; r < peers.replicas() && count != 0; ++r) {
      if (r == peers.replica()) continue;
      const auto expect = [&](Kind kind) {
        auto& wire = peers.gradient_receiver(kind, s, r);
        auto& remembered = peers.remembered_gradients(kind, s, r, peers.replica(), count);
        std::vector<Remembered*> messages;
        for (std::size_t b = 0; b < count; ++b) messages.push_back(&remembered[b]);
        wire.expect(std::move(messages));
        return &wire;
      };
      stage.wires[r] = {&peers.gradient_sender(Kind::kPart, s, r),
                        &peers.gradient_sender(Kind::kSum, s, r),
                        expect(Kind::kPart),
                        expect(Kind::kSum),
                        &peers.remembered_gradients(Kind::kPart, s, peers.replica(), r, count),
                        &peers.remembered_gradients(Kind::kSum, s, peers.replica(), r, count)};
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

void GradientReduction::add(int stage, std::size_t parameter, at::Tensor gradient) {
  auto& of_stage = stages_[stage];
  if (of_stage.is_here[parameter]) return;
  if (gradient.defined()) {
    of_stage.gradients[parameter] = in_parameters_order(std::move(gradient), of_stage.parameters[parameter]);
  }
  of_stage.is_here[parameter] = true;
  send_buckets(stage);
}

void GradientReduction::add_rest(int stage, Gradients gradients) {
  for (std::size_t p = 0; p < gradients.size(); ++p) add(stage, p, std::move(gradients[p]));
}

// Sends the stage's next buckets that are complete.
void GradientReduction::send_buckets(int stage) {
  auto& of_stage = stages_[stage];
  for (auto number = of_stage.sent; number < of_stage.buckets.size(); ++number) {
    const auto& bucket = of_stage.buckets[number];
    for (const auto p : bucket.parameters) {
      if (!of_stage.is_here[p]) return;
    }
    for (int r = 0; r < peers_.replicas(); ++r) {
      if (r == peers_.replica()) continue;
      const auto& wires = of_stage.wires[r];
      auto message = to_message(bucket.shares[r], of_stage.gradients, peers_);
      try {
        wires.send_part->send((*wires.sent_parts)[number], call_, std::move(message));
      } catch (const ConnectionError& error) {
        peers_.fail(error, peers_.twin(r), kWaits);
        throw;
      }
    }
    {
      MutexLock lock(mutex_);
      of_stage.sent = number + 1;
    }
    changed_.notify_all();
  }
}

// Returns false if the backward has ended before.
bool GradientReduction::await_bucket(int stage, std::size_t number) {
  MutexLock lock(mutex_);
  while (stages_[stage].sent <= number && !ended_) changed_.wait(mutex_);
  return stages_[stage].sent > number;
}

// The thread.
void GradientReduction::run() {
  set_intraop_threads_of_this_thread(1);
  at::NoGradGuard no_grad;
  Summed summed;
  try {
    for (int stage = static_cast<int>(stages_.size()) - 1; stage >= 0; --stage) {
      const auto& buckets = stages_[stage].buckets;
      for (std::size_t number = 0; number < buckets.size(); ++number) {
        if (!await_bucket(stage, number)) return;
        sum_share(stage, buckets[number], number);
        take_sums(std::exchange(summed, Summed{stage, &buckets[number]}));
      }
    }
    take_sums(summed);
    await_deliveries();
  } catch (const ConnectionError& error) {
    error_ = std::current_exception();
    peers_.fail(error, awaited_, kWaits);
  } catch (const std::exception& error) {
    error_ = std::current_exception();
    peers_.fail("rank " + std::to_string(peers_.rank()) + " failed while it summed gradients: " + error.what());
  }
  peers_.set_awaited_for_gradients(-1);
}

Parcel GradientReduction::receive(WireReceiver& wire, int replica) {
  awaited_ = peers_.twin(replica);
  peers_.set_awaited_for_gradients(awaited_);
  auto parcels = to_parcels(wire.receive(call_));
  peers_.set_awaited_for_gradients(-1);
  return std::move(parcels.front());
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
  const int own = peers_.replica();
  const auto& share = bucket.shares[own];
  std::vector<Parcel> parts(peers_.replicas());
  for (int r = 0; r < peers_.replicas(); ++r) {
    if (r != own) parts[r] = receive(*stage.wires[r].receive_part, r);
  }
  Parcel sums;
  for (std::size_t k = 0; k < share.size(); ++k) {
    const auto& gradient = stage.gradients[share[k].parameter];
    std::vector<at::Tensor> of_replicas;
    for (int r = 0; r < peers_.replicas(); ++r) {
      if (r != own) {
        of_replicas.push_back(parts[r].tensors.at(k));
      } else {
        of_replicas.push_back(gradient.defined() ? piece_of(gradient, share[k]) : at::Tensor());
      }
    }
    sums.add(sum_of(of_replicas, own), /*gradient_wanted=*/false);
  }
  for (int r = 0; r < peers_.replicas(); ++r) {
    if (r == own) continue;
    const auto& wires = stage.wires[r];
    awaited_ = peers_.twin(r);
    wires.send_sum->send((*wires.sent_sums)[number], call_, to_message({sums}, peers_.rank(), peers_.codec()));
  }
  write(stage, share, sums);
}

// Takes the other replicas' sums of a bucket.
void GradientReduction::take_sums(const Summed& summed) {
  if (summed.bucket == nullptr) return;
  auto& stage = stages_[summed.stage];
  for (int r = 0; r < peers_.replicas(); ++r) {
    if (r != peers_.replica()) write(stage, summed.bucket->shares[r], receive(*stage.wires[r].receive_sum, r));
  }
}

// The sums that are sent lie in the gradients, which the caller may change later.
void GradientReduction::await_deliveries() {
  for (const auto& stage : stages_) {
    for (int r = 0; r < peers_.replicas() && !stage.buckets.empty(); ++r) {
      if (r == peers_.replica()) continue;
      awaited_ = peers_.twin(r);
      peers_.set_awaited_for_gradients(awaited_);
      stage.wires[r].send_sum->drain(peers_.options().timeout());
    }
  }
}

std::vector<Gradients> GradientReduction::take() {
  if (thread_.joinable()) peers_.while_polling([&] { thread_.join(); });
  if (error_) peers_.rethrow(error_);
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
