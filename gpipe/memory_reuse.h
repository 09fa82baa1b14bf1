#pragma once

namespace gpipe {

/// Switches a memory pool for CPU tensors of at least 64 KiB on or off. The pool keeps freed tensor memory for reuse by
/// tensors of about the same size, in huge pages if the system provides them on request. After the first few steps, a
/// training step then allocates no memory from the system.
///
/// The pool belongs to the process and never shrinks; when shapes change, it divides its memory again. Programs call
/// this function; the library never does. A tensor may be allocated before a switch and freed after it.
/// REQUIRES: the first call comes before threads that use PyTorch start. If a process forks while other threads
/// allocate tensors, the child allocates none. Later calls are thread-safe.
void reuse_cpu_memory(bool on = true);

}  // namespace gpipe
