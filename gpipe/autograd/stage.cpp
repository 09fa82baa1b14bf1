#include "gpipe/autograd/stage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>
#include <stdexcept>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/parcel.h"

namespace gpipe {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

constexpr std::int64_t kLarge = std::int64_t{64} << 10;  // bytes

// Modules may share a tensor; the first occurrence counts.
class DistinctTensors {
 public:
  void add(const at::Tensor& tensor) {
    if (tensor.defined() && seen_.insert(tensor.unsafeGetTensorImpl()).second) tensors_.push_back(tensor);
  }
  std::vector<at::Tensor> take() { return std::move(tensors_); }

 private:
  absl::flat_hash_set<const void*> seen_;
  std::vector<at::Tensor> tensors_;
};

// Whether a node was made on this thread since its sequence number was `begin`.
bool made_here(const Node& node, const Capture* capture, std::uint64_t begin) {
  const auto made = capture != nullptr ? capture->made : node.sequence_nr();
  return node.thread_id() == at::RecordFunction::currentThreadId() && made >= begin;
}

[[noreturn]] void refuse_foreign(const Node& node) {
  throw std::invalid_argument(
      "[gpipe] a layer uses a tensor whose graph (" + node.name() +
      ") was built outside this forward of this micro-batch; what a layer keeps from one call to "
      "the next must be detached");
}

[[noreturn]] void refuse_leaf(const torch::autograd::AccumulateGrad& leaf) {
  std::ostringstream message;
  message << "[gpipe] a layer uses a tensor of shape " << leaf.variable.sizes()
          << " that requires grad, but is neither a parameter of the layer nor an input; register it with "
             "register_parameter, pass it through the model, or detach it";
  throw std::invalid_argument(message.str());
}

}  // namespace

std::vector<at::Tensor> Stage::parameters() const {
  DistinctTensors distinct;
  for (const auto& layer : layers) {
    for (const auto& parameter : layer->module()->parameters()) distinct.add(parameter);
  }
  return distinct.take();
}

std::vector<at::Tensor> Stage::buffers() const {
  DistinctTensors distinct;
  for (const auto& layer : layers) {
    for (const auto& buffer : layer->module()->buffers()) distinct.add(buffer);
  }
  return distinct.take();
}

bool ParameterCaptures::has_its_own(const at::Tensor& parameter) {
  return parameter.numel() * parameter.element_size() >= kLarge;
}

ParameterCaptures::ParameterCaptures(const std::vector<at::Tensor>& parameters)
    : all_(parameters), captures_{make_capture()} {
  for (const auto& parameter : parameters) {
    versions_.push_back(version_of(parameter));
    if (!parameter.requires_grad()) continue;
    if (!parameter.is_leaf()) {
      throw std::invalid_argument("[gpipe] a parameter is not a leaf; parameters are made by register_parameter");
    }
    auto capture = has_its_own(parameter) ? captures_.emplace_back(make_capture()) : captures_.front();
    capture->indices.push_back(parameters_.size());
    const auto input = capture->add_input_metadata(parameter);
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    edges_.emplace(accumulator.get(), Edge(std::move(capture), input));
    accumulators_.push_back(std::move(accumulator));
    parameters_.push_back(parameter);
  }
}

void ParameterCaptures::check_unchanged() const {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    if (version_of(all_[i]) == versions_[i]) continue;
    throw std::runtime_error(
        "[gpipe] a parameter was changed in place between the forward and its backward, so that the forward cannot be "
        "recomputed; step the optimizer after the backward");
  }
}

void ParameterCaptures::redirect(const edge_list& roots, std::uint64_t begin) const {
  absl::flat_hash_set<Node*> seen;
  std::vector<Node*> pending;
  const auto visit = [&](Node* node) {
    if (seen.insert(node).second) pending.push_back(node);
  };
  for (const auto& root : roots) {
    if (root.is_valid()) visit(root.function.get());
  }
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    for (std::size_t i = 0; i < node->next_edges().size(); ++i) {
      auto& edge = node->next_edges()[i];
      if (!edge.is_valid()) continue;
      const bool inner = edge.function->num_outputs() > 0;
      const auto* capture = inner ? nullptr : dynamic_cast<Capture*>(edge.function.get());
      if (inner || capture != nullptr) {
        if (!made_here(*edge.function, capture, begin)) refuse_foreign(*edge.function);
        visit(edge.function.get());
      } else if (const auto found = edges_.find(edge.function.get()); found != edges_.end()) {
        edge = found->second;
        // The node of an in-place operation on a view asks the operation's own node, whose edges must be the same.
        if (auto* slices = dynamic_cast<torch::autograd::CopySlices*>(node)) {
          slices->fn->set_next_edge(i, edge);
        }
      } else if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get())) {
        refuse_leaf(*leaf);
      }
    }
  }
}

SavedBuffers::SavedBuffers(std::vector<at::Tensor> buffers) : buffers_(std::move(buffers)) {
  at::NoGradGuard no_grad;
  copies_.reserve(buffers_.size());
  for (const auto& buffer : buffers_) copies_.push_back(buffer.clone());
}

void SavedBuffers::restore() {
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].sizes() == copies_[i].sizes()) {
      buffers_[i].variable_data().copy_(copies_[i]);
    } else {
      buffers_[i].set_data(copies_[i]);  // the layer gave it another shape
    }
  }
}

void SavedBuffers::restore_after_error() noexcept {
  try {
    restore();
  } catch (...) {
  }
}

}  // namespace gpipe
