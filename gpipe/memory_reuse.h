#pragma once

namespace gpipe {

/// Does nothing: a pipeline keeps memory unless GPipeOptions::keep_memory() is false. Will be removed.
inline void reuse_cpu_memory(bool = true) {}

}  // namespace gpipe
