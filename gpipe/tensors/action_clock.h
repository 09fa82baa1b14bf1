#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "gpipe/tensors/transfer.h"
#include "gpipe/timeline.h"

namespace gpipe {

/// Times the actions of one worker on its device by events, so that the host need not wait for each. Its worker calls
/// start(), end() and stop(), with its stream current. Then one other thread may call place().
class ActionClock {
 public:
  /// REQUIRES: `device` is not the CPU.
  explicit ActionClock(c10::Device device) : device_(device) {}

  /// Marks where an action's work begins. Call it after the waits for the action's inputs.
  void start();
  /// Marks where the work of the action that started last ends.
  void end();
  /// Waits for the device's stream. Call it after the last action.
  void stop();

  /// Sets the times of an action's span. Does nothing before stop(). REQUIRES: the calls come in the order of the actions.
  void place(Span& span);

 private:
  struct Marks {
    StreamEvent start;
    StreamEvent end;
  };

  c10::Device device_;
  std::vector<Marks> actions_;
  std::size_t placed_ = 0;
  StreamEvent last_;
  double stopped_ = 0;  // the host's time at `last_`, in seconds
};

}  // namespace gpipe
