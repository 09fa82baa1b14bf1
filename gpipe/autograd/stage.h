#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <functional>

#include "absl/container/flat_hash_map.h"
#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/stage_state.h"
#include "gpipe/base/checks.h"
#include "gpipe/binding.h"
#include "gpipe/tensors/torch_internals.h"
#include "gpipe/timeline.h"
#include "skip/skippable.h"

namespace gpipe {

/// A contiguous run of layers on one device. Used by one thread at a time: its worker, or a caller that holds the
/// pipeline's turn while the workers rest.
struct Stage {
  int index = 0;
  int first_layer = 0;
  std::vector<std::unique_ptr<Layer>> layers;
  RunLayers run_layers;  ///< runs the layers for a language binding; empty: Layer::forward() of each
  c10::Device device = c10::kCPU;

  /// The skips from and to other stages, in the order of the stage's edges, whose first is the activation's. A skip
  /// that goes to several workers may leave several times; one that goes on to a later stage is in both.
  std::vector<SkipKey> skips_in;
  std::vector<SkipKey> skips_out;
  /// How many of its modules read each skip.
  std::map<SkipKey, int> skip_readers;
  /// The names, as "layer.weight", of the parameters that it borrows from earlier stages and lends to later ones. Their
  /// edges are the last, in this order.
  std::vector<std::string> borrowed;
  std::vector<std::string> lent;
  /// The last receivers of the activation, the `skips_out` and the `lent`. The caller counts as the stage after the
  /// last.
  std::vector<int> receivers;

  /// Whether a forward of this stage, or a later one with its input's memory, writes to it. The first backward tells.
  enum class InPlace { kUnknown, kNo, kYes } in_place = InPlace::kUnknown;

  /// Which outputs need gradients, which only the graph of a forward shows. For checkpointed forwards.
  struct NeededGradients {
    std::vector<bool> sources;              ///< for each parameter and input, whether it wanted a gradient then
    std::vector<std::vector<bool>> wanted;  ///< per parcel and tensor; empty if it is not known
    bool vary = false;                      ///< between calls: all floating-point outputs need gradients
  } needed_gradients;
  StageState state;
  LayerTime* layer_times = nullptr;  ///< where the forwards of its layers, and the loss, add their times
  /// Leaves other than parameters that its layers have used, as long as they live.
  absl::flat_hash_map<const c10::TensorImpl*, WeakTensor> leaves;

  /// LanguageBinding::lock; may be empty.
  std::function<void(absl::FunctionRef<void()>)> lock;
  void locked(absl::FunctionRef<void()> call) const { lock ? lock(call) : call(); }

  /// The name of a layer by its index in the stage; "loss" for the index after the last.
  std::string name_of(int layer) const { return layer == std::ssize(layers) ? "loss" : layers[layer]->name(); }
  /// "layer 'NAME'" of the last layer that has a parameter or buffer; "a layer" if none has it.
  std::string owner_of(const at::Tensor& tensor) const {
    std::string owner = "a layer";
    locked([&] {
      for (const auto& layer : layers) {
        const auto has = [&](const auto& tensors) { return index_of(tensor, tensors) < tensors.size(); };
        if (has(layer->buffers().tensors) || has(layer->parameters())) owner = "layer '" + layer->name() + "'";
      }
    });
    return owner;
  }
  /// The layers' parameters, each once, in order of first occurrence.
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& layer : layers) {
      for (const auto& parameter : layer->module()->parameters()) all.push_back(parameter);
    }
    return distinct(std::move(all));
  }
  /// Those with these names. Errors: std::runtime_error for one that its layer no longer has.
  std::vector<at::Tensor> parameters(const std::vector<std::string>& names) const {
    std::vector<at::Tensor> found;
    for (const auto& name : names) {
      found.emplace_back();
      for (const auto& layer : layers) {
        if (!name.starts_with(layer->name() + ".")) continue;
        const auto of_layer = layer->module()->named_parameters();
        const auto* parameter = of_layer.find(name.substr(layer->name().size() + 1));
        if (parameter != nullptr) found.back() = *parameter;
      }
      if (!found.back().defined())
        throw_error("the parameter '", name, "', which stages share, is gone; make a new pipeline");
    }
    return found;
  }
  /// The layers' present buffers, each once.
  std::vector<at::Tensor> buffers() const {
    std::vector<at::Tensor> all;
    for (const auto& layer : layers) {
      for (const auto& buffer : layer->buffers().tensors) all.push_back(buffer);
    }
    return distinct(std::move(all));
  }
};

}  // namespace gpipe
