#include "examples/common/progress.h"

#include <unistd.h>

#include <iostream>
#include <utility>

#include "absl/strings/str_format.h"

namespace gpipe::examples {
namespace {

constexpr char kRedraw[] = "\r\033[K";  // to the start of the line, and erase it
constexpr int kBarWidth = 24;

bool is_terminal() { return isatty(STDOUT_FILENO) != 0; }

std::string bar(double part) {
  const auto filled = static_cast<std::size_t>(part * kBarWidth);
  return "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "]";
}

std::string minutes(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  return absl::StrFormat("%d:%02d", whole / 60, whole % 60);
}

}  // namespace

Progress::Progress(std::string label, std::int64_t images)
    : terminal_(is_terminal()), label_(std::move(label)), images_(images) {}

Progress::~Progress() {
  if (open_) std::cout << std::endl;
}

void Progress::add(std::int64_t images, std::optional<double> loss) {
  done_ += images;
  const bool finished = done_ >= images_;
  const double passed = seconds();
  if (!finished && passed - shown_at_ < (terminal_ ? 0.1 : 10)) return;
  shown_at_ = passed;
  open_ = terminal_ && !finished;
  if (terminal_) std::cout << kRedraw;
  std::cout << label_ << "  ";
  if (terminal_) std::cout << bar(static_cast<double>(done_) / static_cast<double>(images_)) << "  ";
  std::cout << done_ << "/" << images_;
  if (loss) std::cout << absl::StrFormat("  loss %.4f", *loss);
  std::cout << absl::StrFormat("  %.1f images/s", images_per_second());
  if (finished) {
    std::cout << "  in " << minutes(passed) << std::endl;
  } else {
    std::cout << "  ETA " << minutes(static_cast<double>(images_ - done_) / images_per_second())
              << (terminal_ ? "" : "\n") << std::flush;
  }
}

void show_percent(const std::string& label, double part) {
  if (!is_terminal()) return;
  std::cout << kRedraw;
  if (part < 1) std::cout << label << " " << bar(part);
  std::cout << std::flush;
}

}  // namespace gpipe::examples
