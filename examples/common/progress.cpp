#include "examples/common/progress.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"

namespace gpipe::examples {
namespace {

constexpr int kBarWidth = 24;
constexpr double kBarPeriod = 0.1;
constexpr double kLinePeriod = 10;

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string minutes(double seconds) {
  const auto whole = std::lround(seconds);
  return absl::StrFormat("%d:%02d", whole / 60, whole % 60);
}

}  // namespace

Progress::Progress(std::ostream& out, bool terminal, std::string label, int64_t images)
    : Progress(out, terminal, std::move(label), images, steady_seconds) {}

Progress::Progress(std::ostream& out, bool terminal, std::string label, int64_t images, Clock clock)
    : out_(out),
      terminal_(terminal),
      label_(std::move(label)),
      images_(images),
      clock_(std::move(clock)),
      start_(clock_()),
      shown_at_(start_) {}

Progress::~Progress() {
  if (bar_length_ > 0) out_ << std::endl;
}

double Progress::images_per_second() const {
  const double passed = seconds();
  return passed > 0 ? static_cast<double>(done_) / passed : 0;
}

void Progress::add(int64_t images, std::optional<double> loss) {
  done_ += images;
  loss_ = loss;
  const bool finished = done_ >= images_;
  const double now = clock_();
  if (!finished && now - shown_at_ < (terminal_ ? kBarPeriod : kLinePeriod)) return;
  shown_at_ = now;
  show(text());
  if (terminal_ && finished) {
    out_ << std::endl;
    bar_length_ = 0;
  }
}

std::string Progress::text() const {
  const double rate = images_per_second();
  std::string line = label_ + "  ";
  if (terminal_) {
    const auto filled = static_cast<size_t>(std::clamp<int64_t>(done_ * kBarWidth / images_, 0, kBarWidth));
    line += "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "]  ";
  }
  absl::StrAppendFormat(&line, "%d/%d", done_, images_);
  if (loss_) absl::StrAppendFormat(&line, "  loss %.4f", *loss_);
  absl::StrAppendFormat(&line, "  %.1f images/s", rate);
  if (done_ < images_ && rate > 0) {
    line += "  ETA " + minutes(static_cast<double>(images_ - done_) / rate);
  } else {
    line += "  in " + minutes(seconds());
  }
  return line;
}

void Progress::show(const std::string& text) {
  if (!terminal_) {
    out_ << text << std::endl;
    return;
  }
  const std::string rest(bar_length_ - std::min(bar_length_, text.size()), ' ');
  out_ << '\r' << text << rest << std::flush;
  bar_length_ = text.size();
}

}  // namespace gpipe::examples
