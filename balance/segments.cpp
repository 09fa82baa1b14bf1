#include "balance/segments.h"

#include <algorithm>
#include <cmath>

namespace gpipe {
namespace {

constexpr double kSecondsOfSegment = 20e-6;  // for which one more segment of a stage keeps a worker busy
constexpr int kLongest = 32;                 // layers of a segment
constexpr int kWhole = -1;                   // a price
constexpr double kAnyPrice = 1e12;           // seconds per byte: saves what can be saved

/// The last layer that uses a block, forwards or backwards.
int last_use(const Block& block, int layers) {
  const int read = std::max(block.reaches, block.readers.empty() ? 0 : block.readers.back());
  return block.freed_by == Block::kForwardsEnd ? layers : std::max(read, block.freed_by);
}

}  // namespace

Segments::Segments(const Profile& profile)
    : cost_(profile), layers_(cost_.layers()), kept_(layers_), freed_(layers_), extra_(layers_), again_(layers_ + 1) {
  // How many bytes of a layer's forward are last used by each layer, of those that are kept for a backward.
  std::vector<std::vector<std::int64_t>> used(layers_, std::vector<std::int64_t>(layers_ + 1));
  std::vector<std::int64_t> saved(layers_);
  std::vector<std::int64_t> entering(layers_ + 1);  // that a segment beginning here keeps, though no backward would
  for (const auto& block : profile.blocks) {
    if (block.born != Kind::F) continue;
    if (block.until != Kind::F || block.freed_by == Block::kForwardsEnd) {
      used[block.layer][last_use(block, layers_)] += block.bytes;
      saved[block.layer] += block.bytes;
    } else {
      for (int layer = block.layer + 1; layer <= std::min(block.reaches, layers_); ++layer) {
        entering[layer] += block.bytes;
      }
    }
  }
  std::vector<std::int64_t> inner(layers_ + 1);  // by end: bytes of layers from `first` on that are last used before it
  for (int first = layers_; first-- > 0;) {
    std::int64_t sum = 0;
    std::int64_t kept = 0;
    for (int end = first + 1; end <= layers_; ++end) {
      sum += used[first][end - 1];
      inner[end] += sum;
      kept_[first].push_back(kept += saved[end - 1]);
      freed_[first].push_back(std::max<std::int64_t>(0, inner[end] - entering[first]));
    }
  }
  for (int i = 0; i < layers_; ++i) {
    const auto& layer = profile.layers[i];
    again_[i + 1] = again_[i] + layer.stored;
  }
  double cheapest = kAnyPrice;
  double dearest = 0;
  for (int first = 0; first < layers_; ++first) {
    std::int64_t extra = 0;
    for (int end = first + 1; end <= layers_; ++end) {
      const auto& layer = profile.layers[end - 1];
      extra = std::max({extra, layer.backward_extra, layer.input_gradient_extra, layer.forward_extra});
      extra_[first].push_back(extra);
      const auto bytes = freed_[first][end - first - 1];
      if (bytes == 0 || end - first > kLongest) continue;
      const double price = (again_[end] - again_[first] + kSecondsOfSegment) / static_cast<double>(bytes);
      cheapest = std::min(cheapest, price);
      dearest = std::max(dearest, price);
    }
  }
  dearest = std::max(dearest, cheapest);
  prices_.push_back(0);
  for (int price = 1; price < kPrices; ++price) {
    prices_.push_back(cheapest / 4 * std::pow(8 * dearest / cheapest, (price - 1.0) / (kPrices - 2)));
  }
  prices_.push_back(kAnyPrice);
  const auto all = layers_ == 0 ? 0 : kept_.front().back();
  for (int cap = 0; cap < kCaps; ++cap) caps_.push_back(all >> cap);
  solved_.resize(layers_ * (kPrices + 1) * kCaps);
}

std::int64_t Segments::bytes(int first, int end, InFlight in_flight, const Recomputation& recomputation) const {
  const auto kept = kept_[first][end - first - 1] - recomputation.bytes;
  return cost_.static_bytes(first, end) + cost_.gradients(first, end) + in_flight.cells * kept +
         in_flight.graphs * recomputation.rebuilt + extra_[first][end - first - 1];
}

const std::vector<Segments::Best>& Segments::solve(int first, int price, int cap) {
  auto& best = solved_[(first * (kPrices + 1) + price) * kCaps + cap];
  if (!best.empty()) return best;
  best.resize(layers_ - first + 1);
  const auto value = [&](double seconds, std::int64_t bytes) {
    return seconds - prices_[price] * static_cast<double>(bytes);
  };
  for (int end = first + 1; end <= layers_; ++end) {
    best[end - first] = best[end - 1 - first];
    best[end - first].last = -1;
    if (!cost_.can_cut_before(end)) continue;
    double least = value(best[end - first].seconds, best[end - first].bytes);
    for (int start = end - 1; start >= std::max(first, end - kLongest); --start) {
      const auto freed = freed_[start][end - start - 1];
      if (freed > caps_[cap]) break;
      if (freed == 0 || (start > first && !cost_.can_cut_before(start))) continue;
      const auto& before = best[start - first];
      const Best with{before.seconds + again_[end] - again_[start] + kSecondsOfSegment, before.bytes + freed,
                      std::max(before.rebuilt, freed), start};
      if (value(with.seconds, with.bytes) >= least) continue;
      least = value(with.seconds, with.bytes);
      best[end - first] = with;
    }
  }
  return best;
}

Recomputation Segments::recomputation(int price, int cap, int first, int end) {
  if (price == 0) return {};
  const auto& best = solve(first, price, cap)[end - first];
  return {best.seconds, best.bytes, best.rebuilt, price, cap};
}

Recomputation Segments::at(int price, int first, int end, InFlight in_flight) {
  const auto value = [&](const Recomputation& it) {
    const auto bytes = in_flight.cells * it.bytes - in_flight.graphs * it.rebuilt;
    return it.seconds - prices_[price] / in_flight.cells * static_cast<double>(bytes);
  };
  Recomputation best;
  for (int cap = 0; cap < kCaps && price > 0; ++cap) {
    if (const auto other = recomputation(price, cap, first, end); value(other) < value(best)) best = other;
  }
  return best;
}

Recomputation Segments::within(std::int64_t limit, int first, int end, InFlight in_flight) {
  Recomputation best;
  const auto without = bytes(first, end, in_flight);
  if (without <= limit) return best;
  const auto needed = [&](const Recomputation& it) {
    return without - in_flight.cells * it.bytes + in_flight.graphs * it.rebuilt;
  };
  bool fits = false;
  for (int cap = 0; cap < kCaps; ++cap) {
    auto found = recomputation(kPrices, cap, first, end);
    if (!fits && needed(found) < needed(best)) best = found;
    if (needed(found) > limit) continue;
    for (int low = 0, high = kPrices; high - low > 1;) {  // a higher price recomputes more
      const int price = (low + high) / 2;
      const auto other = recomputation(price, cap, first, end);
      const bool is_enough = needed(other) <= limit;
      (is_enough ? high : low) = price;
      if (is_enough) found = other;
    }
    if (!fits || found.seconds < best.seconds) best = found;
    fits = true;
  }
  return best;
}

Recomputation Segments::whole(int first, int end) const {
  const auto freed = freed_[first][end - first - 1];
  return {again_[end] - again_[first], freed, freed, kWhole};
}

std::vector<Segment> Segments::segments(int first, int end, const Recomputation& of) {
  if (of.price == kWhole) return {{first, end}};
  std::vector<Segment> found;
  if (of.price == 0) return found;
  const auto& best = solve(first, of.price, of.cap);
  while (end > first) {
    const int start = best[end - first].last;
    if (start >= 0) found.push_back({start, end});
    end = start >= 0 ? start : end - 1;
  }
  return {found.rbegin(), found.rend()};
}

}  // namespace gpipe
