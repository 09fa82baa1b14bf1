#pragma once

namespace gpipe::examples {

/// During its lifetime, the first SIGINT or SIGTERM is only recorded, so that a program can stop where it chooses. Only one
/// Interrupt can exist at a time.
class Interrupt {
 public:
  /// What a second signal does: it ends the program at once, or nothing. A launcher passes on a signal that the terminal has
  /// sent already, and ends by force a program that takes too long.
  enum class Second { kEnds, kIgnored };
  explicit Interrupt(Second second);
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  /// The signal that was recorded, or 0.
  int signal() const;
};

}  // namespace gpipe::examples
