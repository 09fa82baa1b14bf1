#include "gpipe/autograd/value.h"

#include <stdexcept>

namespace gpipe {

at::Tensor Value::tensor() const {
  if (form_ != Form::kTensor || tensors_.size() != 1) {
    throw std::invalid_argument("[gpipe] expected a single tensor, but this is " + describe());
  }
  return tensors_.front();
}

std::string Value::describe() const {
  if (form_ == Form::kTensor) return tensors_.empty() ? "nothing" : "a tensor";
  return std::string(form_ == Form::kVector ? "a vector of " : "a tuple of ") + std::to_string(tensors_.size()) +
         " tensors";
}

}  // namespace gpipe
