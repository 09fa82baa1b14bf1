#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <utility>

namespace gpipe {

// What differs between the versions of torch. Since 2.13, c10::intrusive_ptr counts the nodes of a graph.
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
