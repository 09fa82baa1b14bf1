#include "gpipe/drawing.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_format.h"

namespace gpipe {
namespace {

using absl::StrAppendFormat;
using absl::StrFormat;

// Pixels.
constexpr double kLeft = 72;
constexpr double kTop = 44;
constexpr double kPlot = 880;
constexpr double kRow = 34;
constexpr double kGap = 6;
constexpr double kBottom = 40;
constexpr double kDigit = 8;  // approximate width of a character

constexpr int kTicks = 8;  // approximate number of ticks on the time axis

struct Look {
  Kind kind;
  const char* name;
  const char* fill;
  const char* letter = "";  // tells a part of a backward, where colours do not
};
// From Okabe and Ito's palette, which is distinguishable with colour blindness.
constexpr Look kLooks[] = {{Kind::F, "forward", "#56b4e9"},
                           {Kind::R, "recompute", "#f0e442"},
                           {Kind::B, "backward", "#009e73"},
                           {Kind::I, "input gradient", "#cc79a7", "I"},
                           {Kind::W, "weight gradient", "#e69f00", "W"}};

void add_letter(std::string& svg, double x, double y, const Look& look) {
  if (look.letter[0] == '\0') return;
  StrAppendFormat(&svg, "<text x=\"%.2f\" y=\"%.1f\" text-anchor=\"middle\" font-size=\"10\">%s</text>", x, y,
                  look.letter);
}

std::string time_text(double seconds) {
  if (seconds < 0.9995e-3) return StrFormat("%.3g µs", seconds * 1e6);
  if (seconds < 0.9995) return StrFormat("%.3g ms", seconds * 1e3);
  return StrFormat("%.3g s", seconds);
}

/// The smallest number of the series 1, 2, 5, 10, 20, ... that is at least `value`.
double round_up(double value) {
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= value) return factor * power;
  }
  return 10 * power;
}

void add_text(std::string& svg, double x, double y, const char* anchor, const std::string& text) {
  StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor, text);
}

void add_legend(std::string& svg, const Timeline& timeline) {
  double x = kLeft;
  for (const auto& look : kLooks) {
    if (std::ranges::none_of(timeline.spans, [&](auto& span) { return span.action.kind == look.kind; })) continue;
    StrAppendFormat(&svg, "<rect x=\"%.1f\" y=\"14\" width=\"14\" height=\"14\" fill=\"%s\" stroke=\"#444\"/>\n", x,
                    look.fill);
    add_letter(svg, x + 7, 25, look);
    add_text(svg, x + 20, 26, "start", look.name);
    x += 36 + kDigit * static_cast<double>(std::string(look.name).size());
  }
  add_text(svg, kLeft + kPlot, 26, "end",
           StrFormat("%s, %.0f %% idle", time_text(timeline.makespan()), 100 * timeline.bubble()));
}

void add_axis(std::string& svg, double seconds, double height) {
  const double bottom = height - kBottom;
  const double tick = round_up(seconds / kTicks);
  for (int i = 0; i * tick <= seconds; ++i) {
    const double x = kLeft + kPlot * i * tick / seconds;
    StrAppendFormat(&svg, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", x, kTop, x,
                    bottom + 4);
    add_text(svg, x, bottom + 20, "middle", i == 0 ? "0" : time_text(i * tick));
  }
}

/// Returns an SVG attribute that draws a later stage of a worker paler; empty for the first of its `stages`.
std::string tone(const std::set<int>& stages, int stage) {
  const auto place = std::distance(stages.begin(), stages.find(stage));
  if (place == 0) return "";
  return StrFormat(" fill-opacity=\"%.2f\"", 1 - 0.7 * static_cast<double>(place) / static_cast<double>(stages.size()));
}

}  // namespace

std::string to_svg(const Timeline& timeline) {
  const double height = kTop + (kRow + kGap) * timeline.workers + kBottom;
  auto svg = StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kLeft + kPlot + 24, height, kLeft + kPlot + 24, height);
  const double seconds = timeline.makespan();
  if (seconds > 0) {
    add_legend(svg, timeline);
    add_axis(svg, seconds, height);
  }
  std::vector<std::set<int>> stages(timeline.workers);
  for (const Span& span : timeline.spans) stages[span.worker].insert(span.action.stage);
  if (std::ranges::any_of(stages, [](const auto& of_worker) { return of_worker.size() > 1; })) {
    add_text(svg, kLeft + kPlot - 160, 26, "end", "paler: later stage");
  }
  const double start = timeline.start();
  const auto row = [](int worker) { return kTop + kGap / 2 + (kRow + kGap) * worker; };
  for (int worker = 0; worker < timeline.workers; ++worker) {
    add_text(svg, kLeft - 10, row(worker) + kRow / 2 + 5, "end", StrFormat("worker %d", worker));
  }
  for (const Span& span : timeline.spans) {
    if (seconds <= 0) break;
    const auto& look = *std::ranges::find(kLooks, span.action.kind, &Look::kind);
    const double x = kLeft + kPlot * (span.start - start) / seconds;
    const double width = kPlot * (span.end - span.start) / seconds;
    const double y = row(span.worker);
    StrAppendFormat(&svg,
                    "<g><title>%s of micro-batch %d on stage %d: %s</title><rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" "
                    "height=\"%.0f\" fill=\"%s\"%s stroke=\"#444\" stroke-width=\"0.5\"/>",
                    look.name, span.action.micro_batch, span.action.stage, time_text(span.end - span.start), x, y,
                    width, kRow, look.fill, tone(stages[span.worker], span.action.stage));
    const auto label = StrFormat("%d", span.action.micro_batch);
    if (width > kDigit * static_cast<double>(label.size()) + 4) {
      const bool has_letter = look.letter[0] != '\0';
      add_letter(svg, x + width / 2, y + 12, look);
      StrAppendFormat(&svg, "<text x=\"%.2f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>", x + width / 2,
                      y + kRow / 2 + (has_letter ? 11 : 5), label);
    }
    svg += "</g>\n";
  }
  return svg + "</svg>\n";
}

}  // namespace gpipe
