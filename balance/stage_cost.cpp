#include "balance/stage_cost.h"

#include <cmath>
#include <initializer_list>

#include "gpipe/base/checks.h"
#include "gpipe/ranks/gradient_reduction.h"

namespace gpipe {
namespace {

constexpr double kMinSeconds = 1e-9;  // of an action, so that actions have an order in time

/// Limit on sums of bytes. Small multiples of it still fit into 64 bits.
constexpr double kMaxBytes = std::int64_t{1} << 58;

double all_bytes(const Profile& profile) {
  double sum = 0;
  const auto add = [&](std::initializer_list<std::int64_t> numbers) {
    for (const auto bytes : numbers) sum += std::abs(static_cast<double>(bytes));
  };
  for (const auto& layer : profile.layers) {
    add({layer.parameters, layer.gradients, layer.optimizer, layer.buffers, layer.output, layer.saved,
         layer.forward_extra, layer.stored_extra, layer.backward_extra, layer.first_backward_extra,
         layer.input_gradient_extra});
  }
  for (const auto& block : profile.blocks) add({block.bytes});
  for (const auto& skip : profile.skips) add({static_cast<std::int64_t>(skip.readers.size()) * skip.bytes});
  for (const auto& tie : profile.ties) add({static_cast<std::int64_t>(tie.layers.size()) * tie.bytes});
  return sum;
}

constexpr double LayerProfile::*kSummedSeconds[] = {&LayerProfile::forward, &LayerProfile::stored,
                                                    &LayerProfile::backward, &LayerProfile::input_gradient,
                                                    &LayerProfile::weight_gradient};
constexpr std::int64_t LayerProfile::*kSummedBytes[] = {&LayerProfile::parameters, &LayerProfile::gradients,
                                                        &LayerProfile::optimizer, &LayerProfile::buffers,
                                                        &LayerProfile::saved};

void add(LayerProfile& sum, const LayerProfile& layer, int sign) {
  for (const auto member : kSummedSeconds) sum.*member += sign * layer.*member;
  for (const auto member : kSummedBytes) sum.*member += sign * layer.*member;
}

}  // namespace

bool is_read(const SkipProfile& skip, int first, int end) {
  const auto next = std::ranges::lower_bound(skip.readers, first);
  return next != skip.readers.end() && *next < end;
}

int stage_of(int layer, const std::vector<int>& ends) {
  return static_cast<int>(std::upper_bound(ends.begin(), ends.end(), layer) - ends.begin());
}

void StageCost::check(const RunOptions& options) const {
  if (options.chunks < 1) refuse_argument("chunks must be positive, but is ", options.chunks);
  if (!(options.chunks * all_bytes_ <= kMaxBytes)) {
    refuse_argument("the bytes of ", options.chunks, " chunks of a profile of ", all_bytes_,
                    " bytes overflow; use fewer chunks");
  }
  gpipe::check(options.network);
}

StageCost::StageCost(const Profile& profile)
    : profile_(profile),
      layers_(static_cast<int>(profile.layers.size())),
      all_bytes_(all_bytes(profile)),
      sums_(layers_ + 1),
      blocks_(layers_),
      can_cut_(layers_ + 1, true),
      has_w_(layers_) {
  if (all_bytes_ > kMaxBytes) refuse_argument("the sum of the profile's bytes, ", all_bytes_, ", overflows");
  for (int i = 0; i < layers_; ++i) {
    const auto& layer = profile_.layers[i];
    sums_[i + 1] = sums_[i];
    add(sums_[i + 1], layer, 1);
    for (int position = layer.shares_with + 1; position <= i; ++position) can_cut_[position] = false;
  }
  for (const auto& block : profile_.blocks) {
    blocks_[block.layer].push_back(&block);
    if (block.until == Kind::W && block.freed_by >= 0) has_w_[block.freed_by] = true;
  }
}

int StageCost::most_stages() const {
  return static_cast<int>(std::count(can_cut_.begin() + 1, can_cut_.end(), true));  // the model's end counts as a cut
}

std::vector<std::vector<std::int64_t>> StageCost::near(const std::vector<std::int64_t>& balance) const {
  const auto ends = this->ends(balance);
  std::vector<std::vector<std::int64_t>> found;
  for (std::size_t s = 0; s + 1 < balance.size(); ++s) {
    for (const int step : {-1, 1}) {
      int moved = step;
      while (!can_cut_before(ends[s] + moved)) moved += step;
      if (balance[s] + moved < 1 || balance[s + 1] - moved < 1) continue;
      auto& other = found.emplace_back(balance);
      other[s] += moved;
      other[s + 1] -= moved;
    }
  }
  return found;
}

LayerProfile StageCost::sum(int first, int end) const {
  auto sum = sums_[end];
  add(sum, sums_[first], -1);
  return sum;
}

double StageCost::seconds(int first, int end, const RunOptions& options) const {
  const auto sum = this->sum(first, end);
  const double share = 1.0 * options.checkpoint.of(0).recomputed(options.chunks) / options.chunks;
  const double seconds = sum.forward + sum.backward + share * sum.stored + (2 + share) * profile_.stage;
  const auto bytes = bytes_in(first, end);
  return bytes > 0 ? seconds + 2 * options.network.link(0, 1).seconds(bytes) : seconds;
}

bool StageCost::splits(int first) const { return profile_.input_requires_grad || gradients(0, first) > 0; }

std::int64_t StageCost::static_bytes(int first, int end) const {
  const auto& before = sums_[first];
  const auto& after = sums_[end];
  return after.parameters - before.parameters + after.buffers - before.buffers + after.optimizer - before.optimizer;
}

std::int64_t StageCost::reduction_bytes(int first, int end, const Network& network) const {
  std::int64_t largest = 0;  // of a layer, at least that of its largest parameter
  for (int layer = first; layer < end; ++layer) largest = std::max(largest, profile_.layers[layer].gradients);
  return gpipe::reduction_bytes(network.replicas, gradients(first, end), largest);
}

std::int64_t StageCost::bytes_in(int first, int end) const {
  std::int64_t bytes = first > 0 ? profile_.layers[first - 1].output : 0;
  for (const auto& skip : profile_.skips) {
    if (skip.from < first && is_read(skip, first, end)) bytes += skip.bytes;
  }
  return bytes + bytes_borrowed(first, end);
}

std::int64_t StageCost::bytes_borrowed(int first, int end) const {
  std::int64_t bytes = 0;
  for (const auto& [name, layers, size] : profile_.ties) {
    const auto next = std::lower_bound(layers.begin(), layers.end(), first);
    if (next != layers.begin() && next != layers.end() && *next < end) bytes += size;
  }
  return bytes;
}

StageCost::SizedEdges StageCost::edges(const std::vector<std::int64_t>& balance,
                                       const std::vector<int>& placement) const {
  const auto ends = this->ends(balance);
  std::vector<LayerLink> links;
  for (const auto& skip : profile_.skips) links.push_back({skip.from, skip.readers, skip.name});
  std::vector<int> cut_links;
  SizedEdges sized{cut_edges(balance, links, placement, &cut_links), {}};
  for (std::size_t s = 0; s + 1 < ends.size(); ++s) sized.bytes.push_back(profile_.layers[ends[s] - 1].output);
  for (const int link : cut_links) sized.bytes.push_back(profile_.skips[link].bytes);
  for (const auto& tie : profile_.ties) {
    const int owner = stage_of(tie.layers.front(), ends);
    for (int last = owner; const int layer : tie.layers) {
      const int stage = stage_of(layer, ends);
      if (std::exchange(last, stage) == stage) continue;
      sized.edges.push_back({owner, stage, "parameter " + tie.name});
      sized.bytes.push_back(tie.bytes);
    }
  }
  return sized;
}

std::vector<int> StageCost::ends(const std::vector<std::int64_t>& balance) const {
  check_balance(balance, layers_);
  return stage_ends(balance);
}

Costs StageCost::costs(const std::vector<std::int64_t>& balance, const RunOptions& options) const {
  const auto ends = this->ends(balance);
  Costs costs;
  for (int first = 0; const int end : ends) {
    auto sum = this->sum(first, end);
    if (!splits(first)) {
      sum.input_gradient = sum.backward;
      sum.weight_gradient = 0;
    }
    for (const auto time : kSummedSeconds) sum.*time = std::max(sum.*time + profile_.stage, kMinSeconds);
    costs.actions.push_back({sum.forward, sum.forward, sum.backward, sum.input_gradient, sum.weight_gradient});
    costs.stored.push_back(sum.stored);
    costs.bytes.push_back(cell_bytes(first, end, ends, options));
    first = end;
  }
  return costs;
}

}  // namespace gpipe
