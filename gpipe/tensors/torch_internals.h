#pragma once

// The internals of torch that the C++ sources rest on, because no public interface does what these do. Each entry says
// why, and names the test that fails first when a version of torch moves it. tests/layers.py refuses such an include
// elsewhere, except in public headers: gpipe/random_scope.h holds a guard of dispatch keys. Those of Gloo are in
// ranks/gloo.cpp, Python's in docs/design.md.
// clang-format off

// Nodes of our own, at cuts, ends and around the pipeline. torch::autograd::Function saves and copies per call, and
// cannot be an end. Test: the build.
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

// The engine's execute(), also with an empty graph, which frees what a failed backward left; the running task, for
// retain_graph and the gradients that it wants; a callback at its end. Tests: Errors.*, Gradients.*, RanksCalls.*.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

// The ends of a layer's graph, which ParameterSinks lead to sums: so a parameter's hooks run once per mini-batch.
// autograd::grad() does not name gradients that are lost. Test: Gradients.*.
#include <torch/csrc/autograd/functions/accumulate_grad.h>

// The strides with which an accumulator takes a gradient as it is.
// Test: Fault.LeavesNothingBehind.
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

// The classes of generated nodes and the tensors that they saved, of which a split backward makes I and W. Torch has no
// gradient of an operator by argument. Test: SplitBackward.LeavesLargeProductsAndConvolutionsToW.
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>

// What a call refuses or notices: forward-mode derivatives, traces, and the hooks of DistributedDataParallel's reducer.
// Tests: Refusal.OfForwardModeDerivatives, test_torch_tools.py.
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/jit/frontend/tracer.h>

// The slot of ThreadLocalDebugInfo in which the profiler gets reports of allocations: the bytes of each worker. There is
// no public observer of allocations. Test: StepMemory*.
#include <torch/csrc/profiler/orchestration/observer.h>

// Python's dispatch modes, below which random draws are left to the mode. Test: test_torch_tools.py.
#include <c10/core/impl/TorchDispatchModeTLS.h>

// Streams, events and the number of devices of any kind of device, without CUDA's headers. Test: accelerator_tests.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

// The allocator of CPU memory below the one that keeps it. Test: KeptMemory.*.
#include <c10/core/impl/alloc_cpu.h>
// clang-format on

#include <torch/version.h>

#include <memory>
#include <utility>

// Functions of libraries that come with LibTorch without headers: threads of the operators of one thread. Weak, because
// a LibTorch without OpenMP or MKL lacks them. Test: Threads.UseTheGivenIntraopThreadsOrAnEqualShare.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int threads);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);
}

namespace gpipe {

/// A dispatch key above autograd and autocast that torch leaves to out-of-tree code. Scopes include it, so that kernels
/// see every operator that draws, writes or normalizes by batches, from the first scope on. A mode in C++, as cheap as a
/// key, would replace it. Test: RandomScope.CatchesEveryRandomOperator.
inline constexpr c10::DispatchKey kInterceptingKey = c10::DispatchKey::DeferredInit;

// Who counts the nodes of a graph differs between the versions of torch: c10::intrusive_ptr since 2.13.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
template <class T>
using NodePtr = c10::intrusive_ptr<T>;

template <class T, class... Args>
NodePtr<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

template <class T, class U>
NodePtr<T> node_cast(const NodePtr<U>& node) {
  return c10::static_intrusive_pointer_cast<T>(node);
}
#else
template <class T>
using NodePtr = std::shared_ptr<T>;

template <class T, class... Args>
NodePtr<T> make_node(Args&&... args) {
  return {new T(std::forward<Args>(args)...), torch::autograd::deleteNode};
}

template <class T, class U>
NodePtr<T> node_cast(const NodePtr<U>& node) {
  return std::static_pointer_cast<T>(node);
}
#endif

}  // namespace gpipe
