#pragma once

namespace gpipe {

/// While one exists, the process keeps the memory of freed CPU tensors for the next step, without page faults. The last
/// one to go returns free memory to the system. Sets options of glibc's malloc, not of another malloc. Thread-safe.
class KeptMemory {
 public:
  KeptMemory();
  ~KeptMemory();
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
};

}  // namespace gpipe
