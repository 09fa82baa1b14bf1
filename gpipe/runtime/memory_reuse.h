#pragma once

namespace gpipe {

/// Switches a memory pool for CPU tensors of at least 64 KiB on or off. The pool keeps freed tensor memory for reuse by
/// tensors of about the same size, in huge pages if the system provides them on request. After the first few steps, a
/// training step then allocates no memory from the system. Without the pool, the C library returns large blocks, and the
/// next step faults them in again page by page, with all workers under one lock of the kernel.
///
/// The pool is process-wide and never shrinks; when shapes change, it divides its memory again. The library never calls
/// this function: programs do. The first call must come before threads that use PyTorch start. Tensors can be allocated
/// and freed on either side of a switch. If a process forks while other threads allocate tensors, the child must not
/// allocate any.
void reuse_cpu_memory(bool on = true);

}  // namespace gpipe
