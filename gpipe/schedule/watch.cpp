#include "gpipe/watch.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gpipe/schedule/advice.h"

namespace gpipe {
namespace {

constexpr std::size_t kSteps = 20;
constexpr int kMargins = 5;                           // columns of a lane that show neither actions nor bytes
constexpr std::array kColors = {44, 43, 42, 45, 46};  // of F, R, B, I, W, as a terminal's backgrounds

std::string megabytes(std::int64_t bytes) {
  const double number = static_cast<double>(bytes) / 1e6;
  return number < 1e4 ? absl::StrFormat("%.4g", number) : absl::StrFormat("%.0f", number);
}

std::string lane_of(const StepBlame& step, const std::vector<Span>& spans, int worker, int width) {
  std::vector<std::string> cells(width, " ");
  const auto cell = [&](double time) {
    return static_cast<int>((time - step.start) / (step.end - step.start) * width);
  };
  for (const auto& span : spans) {
    if (span.worker != worker || span.step != step.step) continue;
    const auto kind = span.action.kind;
    const auto drawn = absl::StrFormat("\033[%d;30m%c\033[0m", kColors[static_cast<std::size_t>(kind)], to_char(kind));
    const int first = std::clamp(cell(span.start), 0, width - 1);
    std::fill_n(cells.begin() + first, std::clamp(cell(span.end) - first, 1, width - first), drawn);
  }
  const auto text = std::accumulate(cells.begin(), cells.end(), std::string());
  return absl::StrFormat("%3d %s", worker, text);
}

}  // namespace

std::string Watch::show(const Timeline& timeline, std::string line, int columns,
                        const std::vector<std::int64_t>& room) {
  const auto steps = blame(timeline);
  if (steps.empty()) return "";
  const auto& step = steps.back();
  const double seconds = step.end - step.start;
  gains_.push_back(gains(timeline, {step}).front());
  if (gains_.size() > kSteps) gains_.pop_front();
  double idle = 0;
  for (const auto& wait : step.waits) idle += wait.end - wait.start;
  absl::StrAppendFormat(&line, ", idle %.0f%%", 100 * idle / seconds / timeline.workers);
  const auto peaks = timeline.peak_bytes();
  const auto bytes_of = [&](std::size_t worker) {
    return megabytes(peaks[worker]) + (worker < room.size() ? " of " + megabytes(room[worker]) : "") + " MB";
  };
  const auto most = std::ranges::max_element(peaks) - peaks.begin();
  if (peaks[most] > 0) absl::StrAppend(&line, ", at most ", bytes_of(most));
  auto causes = step.parts;
  causes.erase("work");
  const auto& [cause, cost] = *std::ranges::max_element(causes, {}, [](const auto& part) { return part.second; });
  if (cost > 0) absl::StrAppendFormat(&line, ", %s %.0f%%", cause, 100 * cost / seconds);
  const auto saving = advice({gains_.begin(), gains_.end()}, seconds);
  if (!saving.empty()) {
    absl::StrAppendFormat(&line, ", %s would save %.0f%%", saving[0].change, 100 * saving[0].seconds / seconds);
  }
  if (columns == 0) return line + "\n";
  auto text = drawn_ > 0 ? absl::StrFormat("\033[%dF\033[J", drawn_) : "";
  auto end = std::min<std::size_t>(line.size(), columns);
  while (end < line.size() && (line[end] & 0xC0) == 0x80) --end;  // not within a character
  absl::StrAppend(&text, line.substr(0, end), "\n");
  int widest = 0;
  for (int w = 0; w < timeline.workers; ++w) widest = std::max(widest, static_cast<int>(bytes_of(w).size()));
  for (int w = 0; w < timeline.workers; ++w) {
    const auto lane = lane_of(step, timeline.spans, w, std::max(10, columns - kMargins - widest));
    absl::StrAppendFormat(&text, "%s %*s\n", lane, widest, bytes_of(w));
  }
  drawn_ = 1 + timeline.workers;
  return text;
}

}  // namespace gpipe
