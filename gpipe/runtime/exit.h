#pragma once

namespace gpipe {

/// Makes exit() wait for the calling thread. exit() destroys objects that running calls still use, LibTorch's too. So it
/// first waits, for up to five seconds, until no other thread has a guard. Once it has begun, a thread that makes or
/// destroys a guard sleeps for good. Guards can be nested.
class ExitGuard {
 public:
  ExitGuard();
  ~ExitGuard();
  ExitGuard(const ExitGuard&) = delete;
};

/// Whether exit() has begun.
bool process_exits();

}  // namespace gpipe
