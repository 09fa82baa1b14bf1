#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpipe/api.h"

namespace gpipe {

/// The structure of an object of another language, without its tensors. Immutable. Thread-safe.
class GPIPE_API Structure {
 public:
  virtual ~Structure() = default;
  virtual bool equals(const Structure& other) const = 0;
  /// For messages.
  virtual std::string describe() const = 0;
};

/// Converts structures to bytes and back, for other processes. Called on any thread. Empty for C++ models.
struct StructureCodec {
  std::function<std::string(const Structure&)> encode;
  std::function<std::shared_ptr<const Structure>(const std::string& bytes)> decode;
};

/// The input or output of a layer: a tensor, a vector of tensors, a tuple of 2 to 8 tensors, or the tensors of an
/// object of another language. By its form, a layer gets the type that the previous one returned, at any balance.
class GPIPE_API Value {
 public:
  struct Form {
    enum Kind { kTensor, kVector, kTuple, kObject };

    /*implicit*/ Form(Kind of_kind) : kind(of_kind) {}
    /// REQUIRES: `of_object` is not null.
    /*implicit*/ Form(std::shared_ptr<const Structure> of_object) : kind(kObject), structure(std::move(of_object)) {}
    friend bool operator==(const Form& a, const Form& b) {
      return a.kind == b.kind && (a.structure == b.structure || a.structure->equals(*b.structure));
    }

    Kind kind;
    std::shared_ptr<const Structure> structure;  ///< null unless kind is kObject
  };

  Value() = default;
  /*implicit*/ Value(at::Tensor tensor) : tensors_{std::move(tensor)} {}
  /*implicit*/ Value(std::vector<at::Tensor> tensors) : form_(Form::kVector), tensors_(std::move(tensors)) {}
  template <typename... Tensors>
  /*implicit*/ Value(std::tuple<Tensors...> tuple) : form_(Form::kTuple) {
    static_assert(sizeof...(Tensors) >= 2 && sizeof...(Tensors) <= 8, "a tuple of 2 to 8 tensors");
    std::apply([this](auto&... tensors) { (tensors_.push_back(std::move(tensors)), ...); }, tuple);
  }
  Value(Form form, std::vector<at::Tensor> tensors) : form_(form), tensors_(std::move(tensors)) {}

  const Form& form() const { return form_; }
  const std::vector<at::Tensor>& tensors() const& { return tensors_; }
  std::vector<at::Tensor> tensors() && { return std::move(tensors_); }

  /// Returns the single tensor. Errors: std::invalid_argument when this is not one.
  at::Tensor tensor() const {
    if (form_.kind != Form::kTensor || tensors_.size() != 1) refuse();
    return tensors_.front();
  }

  /// "a tensor", "a vector of 3 tensors", "a tuple of 2 tensors", or the description of an object's structure.
  std::string describe() const;

 private:
  [[noreturn]] void refuse() const;

  Form form_ = Form::kTensor;
  std::vector<at::Tensor> tensors_;
};

}  // namespace gpipe
