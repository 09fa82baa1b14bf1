#include "balance/layer_times.h"

#include <map>
#include <span>

#include "gpipe/base/clock.h"

namespace gpipe {
namespace {

constexpr double kLeastSeconds = 1e-9;  // of a stage that takes less than one without layers

/// A field of a layer's profile that the time of an action tells.
struct Timed {
  Kind kind;
  double LayerProfile::*field;
};

/// Groups of fields whose sum a stage's layers share. The first stage's I computes all gradients, so its W has nothing.
std::vector<std::vector<Timed>> timed(bool stored) {
  if (stored) return {{{Kind::F, &LayerProfile::stored}}};
  return {{{Kind::F, &LayerProfile::forward}},
          {{Kind::B, &LayerProfile::backward}},
          {{Kind::I, &LayerProfile::input_gradient}, {Kind::W, &LayerProfile::weight_gradient}}};
}

}  // namespace

void read_times(Profile& profile, const std::vector<int>& ends, const std::vector<Span>& spans, bool stored) {
  std::map<std::pair<int, Kind>, std::vector<double>> durations;
  for (const auto& span : spans) {
    durations[{span.action.stage, span.action.kind}].push_back(span.lead + span.end - span.start - span.queued);
  }
  const auto median_of = [&](int stage, Kind kind) {
    const auto found = durations.find({stage, kind});
    return found == durations.end() ? 0 : median(found->second);
  };
  const int stages = static_cast<int>(ends.size());
  const auto seconds_of = [&](int stage, Kind kind) {
    const double seconds = median_of(stage, kind);
    return seconds > 0 ? std::max(kLeastSeconds, seconds - median_of(stages, kind)) : 0;
  };
  for (int stage = 0, first = 0; stage < stages; first = ends[stage++]) {
    const auto layers = std::span(profile.layers).subspan(first, ends[stage] - first);
    for (const auto& group : timed(stored)) {
      double before = 0;
      double after = 0;
      for (const auto& [kind, field] : group) {
        after += seconds_of(stage, kind);
        for (const auto& layer : layers) before += layer.*field;
      }
      if (after == 0) continue;  // not measured
      for (const auto& [kind, field] : group) {
        for (auto& layer : layers) layer.*field *= before > 0 ? after / before : 0;
        if (before == 0) layers.back().*field = seconds_of(stage, kind);
      }
    }
  }
  if (!stored) profile.stage = median_of(stages, Kind::F);
}

}  // namespace gpipe
