#pragma once

namespace gpipe {

/// While one exists, the process keeps the memory of freed CPU tensors for the next step, which then has no page faults.
/// The last one to go returns free memory to the system. Sets the options of glibc's malloc; programs with another malloc
/// stay as they are. Thread safety: any thread.
class KeptMemory {
 public:
  KeptMemory();
  ~KeptMemory();
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
};

}  // namespace gpipe
