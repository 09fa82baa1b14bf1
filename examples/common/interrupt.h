#pragma once

namespace gpipe::examples {

/// During its lifetime, the first SIGINT or SIGTERM is only recorded, so that a program can stop where it chooses. A
/// second one ends the program at once. Only one Interrupt can exist at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  /// The signal that was recorded, or 0.
  int signal() const;
};

}  // namespace gpipe::examples
