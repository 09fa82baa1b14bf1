#pragma once

namespace gpipe {

/// From now on (or, with false, no longer) CPU tensors of 64 KiB and more take their memory from a pool, which keeps
/// what is freed for the next of about that size, in huge pages where the system gives them on request. A training step
/// then asks the system for no memory once the first few have run: without it, the C library hands large blocks back,
/// and the next step faults them in again page by page, all workers under one lock of the kernel.
///
/// The pool belongs to the process: this is for a program to call, first before it starts threads that use PyTorch; the
/// library itself never does. It never shrinks; after a change of shapes it divides anew what it has. Tensors may be
/// freed after it was switched off, and made before it was on. A process that forks while other threads make tensors
/// must not make any in the child.
void reuse_cpu_memory(bool on = true);

}  // namespace gpipe
