#pragma once

namespace gpipe::examples {

/// While one lives, the first SIGINT or SIGTERM is only noted, so that a program can end at a place of its choice; a
/// second one ends it at once. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  /// The signal that has come, or 0.
  int signal() const;
};

}  // namespace gpipe::examples
