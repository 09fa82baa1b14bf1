#include "gpipe/timeline.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace gpipe {
namespace {

using Json = nlohmann::ordered_json;

/// Identifies a span that exchanges data: stage, whether it is gradients, replica, step, micro-batch.
using Key = std::tuple<int, bool, int, int, int>;

}  // namespace

double Timeline::start() const {
  return spans.empty() ? std::numeric_limits<double>::infinity() : std::ranges::min(spans, {}, &Span::start).start;
}

double Timeline::makespan() const { return spans.empty() ? 0 : std::ranges::max(spans, {}, &Span::end).end - start(); }

double Timeline::bubble() const {
  const double available = workers * makespan();
  if (available <= 0) return 0;
  double busy = 0;
  for (const Span& span : spans) busy += span.end - span.start;
  return std::max(0.0, 1 - busy / available);
}

std::vector<std::int64_t> Timeline::peak_bytes() const {
  std::vector<std::int64_t> peaks(workers, 0);
  for (const Span& span : spans) peaks[span.worker] = std::max(peaks[span.worker], span.bytes.peak);
  return peaks;
}

std::string to_chrome_json(const Timeline& timeline) {
  // Rounded, so that adjacent slices do not overlap.
  const auto nanos = [origin = timeline.start()](double time) { return std::round((time - origin) * 1e9); };
  const auto micros = [&](double time) { return nanos(time) / 1e3; };
  Json events = Json::array();
  const auto add = [&](const char* phase, const std::string& name, const Json& members) {
    events.push_back({{"name", name}, {"ph", phase}, {"pid", 0}});
    events.back().update(members);
  };
  for (int worker = 0; worker < timeline.workers; ++worker) {
    add("M", "thread_name", {{"tid", worker}, {"args", {{"name", absl::StrCat("worker ", worker)}}}});
  }
  std::map<Key, const Span*> carriers;
  for (const Span& span : timeline.spans) {
    const auto [kind, stage, m] = span.action;
    const std::string letter(1, to_char(kind));
    add("X", to_string(span.action),
        {{"cat", "action"},
         {"tid", span.worker},
         {"ts", micros(span.start)},
         {"dur", (nanos(span.end) - nanos(span.start)) / 1e3},
         {"args", {{"stage", stage}, {"micro_batch", m}, {"kind", letter}, {"step", span.step}}}});
    for (const auto& [time, bytes] : {std::pair(span.start, span.bytes.peak), std::pair(span.end, span.bytes.after)}) {
      if (span.bytes.peak == 0) continue;
      add("C", absl::StrCat("bytes of worker ", span.worker), {{"ts", micros(time)}, {"args", {{"bytes", bytes}}}});
    }
    if (kind == Kind::R || kind == Kind::W) continue;
    const int replica = timeline.replicas == 1 ? 0 : span.worker / (timeline.workers / timeline.replicas);
    carriers[{stage, kind != Kind::F, replica, span.step, m}] = &span;
  }
  int arrows = 0;
  for (const Edge& edge : timeline.edges) {
    for (const auto& [key, from] : carriers) {
      const auto [stage, gradient, replica, step, m] = key;
      if (stage != (gradient ? edge.to : edge.from)) continue;
      const auto to = carriers.find({gradient ? edge.from : edge.to, gradient, replica, step, m});
      if (to == carriers.end()) continue;
      // Viewers attach an arrow that ends on the border of a slice to the adjacent one, so it ends in the middle.
      for (const Span* end : {from, to->second}) {
        const double middle = micros(end->start + (end->end - end->start) / 2);
        add(end == from ? "s" : "f", edge.name,
            {{"cat", "edge"}, {"bp", "e"}, {"id", arrows}, {"tid", end->worker}, {"ts", middle}});
      }
      ++arrows;
    }
  }
  const Json trace = {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  return trace.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

}  // namespace gpipe
