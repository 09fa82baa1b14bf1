#pragma once

namespace gpipe {

/// While one exists, PyTorch's allocator of CPU memory keeps freed blocks of at least 64 KiB for the next ones of the
/// same size, without page faults. Live and kept blocks together take at most 1.25 times the most bytes that were live
/// at once. The last one to go frees the kept blocks. Blocks may outlive it, and may be freed by either
/// allocator. Leaves an allocator that the program has set as it is. A forked child keeps nothing. Thread-safe.
class KeptMemory {
 public:
  KeptMemory();
  ~KeptMemory();
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
};

}  // namespace gpipe
