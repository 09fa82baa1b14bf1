#include "gpipe/timeline.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace gpipe {
namespace {

using absl::StrAppendFormat;

double first_start(const std::vector<Span>& spans) {
  double first = std::numeric_limits<double>::infinity();
  for (const Span& span : spans) first = std::min(first, span.start);
  return first;
}

/// The busy time of other workers during a span, divided by its duration. Can exceed 1 with several other workers.
double overlap_of(const Span& span, const Timeline& timeline) {
  double seconds = 0;
  for (const auto& other : timeline.spans) {
    if (other.worker == span.worker) continue;
    seconds += std::max(0.0, std::min(span.end, other.end) - std::max(span.start, other.start));
  }
  return span.end > span.start ? seconds / (span.end - span.start) : 0;
}

std::string json_string(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      StrAppendFormat(&out, "\\u%04x", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out += '"';
}

/// Writes the list of events, with commas between them.
class Writer {
 public:
  explicit Writer(double origin) : origin_(origin) {}

  void track(int worker) {
    begin();
    StrAppendFormat(&json_, R"({"name":"thread_name","ph":"M","pid":0,"tid":%d,"args":{"name":"worker %d"}})", worker,
                    worker);
  }

  void slice(const Span& span) {
    begin();
    StrAppendFormat(&json_,
                    R"({"name":"%s","cat":"action","ph":"X","pid":0,"tid":%d,"ts":%.3f,"dur":%.3f,)"
                    R"("args":{"stage":%d,"micro_batch":%d,"kind":"%c","step":%d}})",
                    to_string(span.action), span.worker, micros(span.start), micros(span.end) - micros(span.start),
                    span.action.stage, span.action.micro_batch, to_char(span.action.kind), span.step);
  }

  void bytes(const Span& span) {
    for (const auto& [seconds, bytes] :
         {std::pair(span.start, span.bytes.peak), std::pair(span.end, span.bytes.after)}) {
      begin();
      StrAppendFormat(&json_, R"({"name":"bytes of worker %d","ph":"C","pid":0,"ts":%.3f,"args":{"bytes":%d}})",
                      span.worker, micros(seconds), bytes);
    }
  }

  /// Puts the ends in the middle of their slices. Viewers attach an arrow that ends on a border to the adjacent slice.
  void arrow(const Edge& edge, const Span& from, const Span& to) {
    const std::string name = json_string(edge.name);
    begin();
    StrAppendFormat(&json_, R"({"name":%s,"cat":"edge","ph":"s","id":%d,"pid":0,"tid":%d,"ts":%.3f})", name, arrows_,
                    from.worker, micros(middle(from)));
    begin();
    StrAppendFormat(&json_, R"({"name":%s,"cat":"edge","ph":"f","bp":"e","id":%d,"pid":0,"tid":%d,"ts":%.3f})", name,
                    arrows_++, to.worker, micros(middle(to)));
  }

  std::string finish() && { return json_ + "\n]}\n"; }

 private:
  static double middle(const Span& span) { return span.start + (span.end - span.start) / 2; }
  /// Rounded to the nanoseconds that are written, so that adjacent slices do not overlap.
  double micros(double seconds) const { return std::round((seconds - origin_) * 1e9) / 1e3; }
  void begin() { json_ += json_.back() == '[' ? "\n" : ",\n"; }

  const double origin_;
  int arrows_ = 0;
  std::string json_ = R"({"displayTimeUnit":"ms","traceEvents":[)";
};

/// Identifies a span that exchanges data: stage, whether it is gradients, replica, step, micro-batch.
using Key = std::tuple<int, bool, int, int, int>;

}  // namespace

double Timeline::makespan() const {
  if (spans.empty()) return 0;
  double last = -std::numeric_limits<double>::infinity();
  for (const Span& span : spans) last = std::max(last, span.end);
  return last - first_start(spans);
}

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

std::map<std::pair<int, Kind>, std::vector<const Span*>> most_overlapped(const Timeline& timeline) {
  std::map<std::pair<int, Kind>, std::vector<const Span*>> spans;
  for (const auto& span : timeline.spans) spans[{span.action.stage, span.action.kind}].push_back(&span);
  for (auto& [action, of_action] : spans) {
    std::map<const Span*, double> overlaps;
    double most = 0;
    for (const Span* span : of_action) most = std::max(most, overlaps[span] = overlap_of(*span, timeline));
    std::erase_if(of_action, [&](const Span* span) { return overlaps.at(span) < 0.9 * most; });
  }
  return spans;
}

std::string to_chrome_json(const Timeline& timeline) {
  Writer writer(first_start(timeline.spans));
  for (int worker = 0; worker < timeline.workers; ++worker) writer.track(worker);

  std::map<Key, const Span*> carriers;
  for (const Span& span : timeline.spans) {
    writer.slice(span);
    if (span.bytes.peak > 0) writer.bytes(span);
    const auto [kind, stage, micro_batch] = span.action;
    if (kind == Kind::R || kind == Kind::W) continue;
    const int replica = timeline.replicas == 1 ? 0 : span.worker / (timeline.workers / timeline.replicas);
    carriers[{stage, kind != Kind::F, replica, span.step, micro_batch}] = &span;
  }

  for (const Edge& edge : timeline.edges) {
    for (const bool gradient : {false, true}) {
      const int from = gradient ? edge.to : edge.from;
      const int to = gradient ? edge.from : edge.to;
      constexpr int kFirst = std::numeric_limits<int>::min();
      for (auto it = carriers.lower_bound({from, gradient, kFirst, kFirst, kFirst}); it != carriers.end(); ++it) {
        const auto [stage, is_gradient, replica, step, micro_batch] = it->first;
        if (stage != from || is_gradient != gradient) break;
        const auto consumer = carriers.find({to, gradient, replica, step, micro_batch});
        if (consumer != carriers.end()) writer.arrow(edge, *it->second, *consumer->second);
      }
    }
  }
  return std::move(writer).finish();
}

}  // namespace gpipe
