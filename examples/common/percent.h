#pragma once

#include <iosfwd>
#include <string>

namespace gpipe::examples {

/// Shows what part of some work is done, on a terminal only: a line that is redrawn in place and wiped at the end.
class Percent {
 public:
  /// `out` must outlive this.
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
