#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>

namespace gpipe::examples {

/// Shows how far one pass over images is: on a terminal a bar that is redrawn in place (at most ten times a second),
/// elsewhere a plain line every ten seconds; in both, a line at the end. Not synchronised.
class Progress {
 public:
  using Clock = std::function<double()>;  ///< seconds since any fixed time

  /// `images` >= 1 is the number in the pass. `out` must outlive this.
  Progress(std::ostream& out, bool terminal, std::string label, int64_t images);
  Progress(std::ostream& out, bool terminal, std::string label, int64_t images, Clock clock);
  /// Ends the line of an unfinished bar, so that an error message starts on its own.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// So many more images are done; `loss` is what to show, if any.
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
  size_t bar_length_ = 0;  // what the terminal shows in the present line
};

}  // namespace gpipe::examples
