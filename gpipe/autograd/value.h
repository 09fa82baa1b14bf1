#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gpipe {

/// What a layer takes or returns: one tensor, a vector of tensors, or a tuple of 2 to 8. It remembers which, so that
/// the next layer gets the C++ type that the layer before it returned, wherever the model is cut.
class Value {
 public:
  enum class Form { kTensor, kVector, kTuple };

  Value() = default;
  /*implicit*/ Value(at::Tensor tensor) : tensors_{std::move(tensor)} {}
  /*implicit*/ Value(std::vector<at::Tensor> tensors) : form_(Form::kVector), tensors_(std::move(tensors)) {}
  template <typename... Tensors>
  /*implicit*/ Value(std::tuple<Tensors...> tuple) : form_(Form::kTuple) {
    static_assert(sizeof...(Tensors) >= 2 && sizeof...(Tensors) <= 8, "a tuple of 2 to 8 tensors");
    std::apply([this](auto&... tensors) { (tensors_.push_back(std::move(tensors)), ...); }, tuple);
  }
  Value(Form form, std::vector<at::Tensor> tensors) : form_(form), tensors_(std::move(tensors)) {}

  Form form() const { return form_; }
  const std::vector<at::Tensor>& tensors() const& { return tensors_; }
  std::vector<at::Tensor> tensors() && { return std::move(tensors_); }

  /// The one tensor. Errors: std::invalid_argument when this is not a single tensor.
  at::Tensor tensor() const;

  /// "a tensor", "a vector of 3 tensors", "a tuple of 2 tensors".
  std::string describe() const;

 private:
  Form form_ = Form::kTensor;
  std::vector<at::Tensor> tensors_;
};

}  // namespace gpipe
