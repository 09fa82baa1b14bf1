#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>

namespace gpipe::examples {

/// Shows the progress of one pass over images: on a terminal as a bar that is redrawn in place, at most ten times a
/// second; elsewhere as a line every ten seconds. Both end with a line. Not synchronised.
class Progress {
 public:
  using Clock = std::function<double()>;  ///< seconds since some fixed time

  /// `images` is the number in the pass. `out` must outlive this object. REQUIRES: images >= 1.
  Progress(std::ostream& out, bool terminal, std::string label, int64_t images);
  Progress(std::ostream& out, bool terminal, std::string label, int64_t images, Clock clock);
  /// Ends the line of an unfinished bar, so that an error message starts on a new line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Counts `images` more as done. Shows `loss` if it is given.
  void add(int64_t images, std::optional<double> loss = std::nullopt);

  double seconds() const { return clock_() - start_; }
  double images_per_second() const;

 private:
  std::string text() const;
  void show(const std::string& text);

  std::ostream& out_;
  const bool terminal_;
  const std::string label_;
  const int64_t images_;
  const Clock clock_;
  const double start_;
  double shown_at_;
  int64_t done_ = 0;
  std::optional<double> loss_;
  size_t bar_length_ = 0;  // characters in the terminal's current line
};

}  // namespace gpipe::examples
