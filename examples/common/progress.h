#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace gpipe::examples {

/// Shows the progress of one pass over images on standard output: on a terminal as a line that is redrawn in place, at
/// most ten times a second; elsewhere as a line every ten seconds. Both end with a line.
class Progress {
 public:
  /// `images` is the number in the pass.
  Progress(std::string label, std::int64_t images);
  /// Ends the line of an unfinished pass, so that an error message starts on a new line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Counts `images` more as done. Shows `loss` if it is given.
  void add(std::int64_t images, std::optional<double> loss = std::nullopt);

  double images_per_second() const { return static_cast<double>(done_) / seconds(); }

 private:
  using Clock = std::chrono::steady_clock;

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  const bool terminal_;
  const std::string label_;
  const std::int64_t images_;
  const Clock::time_point start_ = Clock::now();
  double shown_at_ = 0;
  std::int64_t done_ = 0;
  bool open_ = false;  // whether the terminal's line has not ended
};

/// Shows a part of some work that is done, on a terminal.
void show_percent(const std::string& label, double part);

}  // namespace gpipe::examples
