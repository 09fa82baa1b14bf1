#pragma once

#include <iosfwd>
#include <string>

namespace gpipe::examples {

/// Shows on a terminal how much of some work is done, in one line that is redrawn, and erased at the end. Shows nothing
/// elsewhere.
class Percent {
 public:
  /// `out` must outlive this object.
  Percent(std::ostream& out, bool terminal, std::string label);
  ~Percent();
  Percent(const Percent&) = delete;
  Percent& operator=(const Percent&) = delete;

  /// `part` is between 0 and 1.
  void show(double part);

 private:
  std::ostream& out_;
  const bool terminal_;
  const std::string label_;
  int shown_ = -1;
};

}  // namespace gpipe::examples
