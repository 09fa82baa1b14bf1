#pragma once

#include <deque>
#include <string>

#include "gpipe/timeline.h"

namespace gpipe {

/// Shows the steps of a training while it runs: in a log, a line for each; in a terminal, also what each worker did, in the
/// place of the previous step.
class GPIPE_API Watch {
 public:
  /// Returns the text that shows the last complete step of a timeline with all workers; "" if there is none. `line` is what
  /// the program says of the step. `columns` is the width of the terminal, 0 for a log. `room` has the bytes that each
  /// worker may use, if known. Ends the line with the change that saved most in the last steps, as blame.h's
  /// to_json_lines() knows them.
  std::string show(const Timeline& timeline, std::string line, int columns, const std::vector<std::int64_t>& room = {});

 private:
  std::deque<std::map<std::string, double>> gains_;  // of the last steps
  int drawn_ = 0;                                    // lines in the terminal
};

}  // namespace gpipe
