#include "gpipe/tensors/value.h"

#include <stdexcept>

namespace gpipe {

bool operator==(const Value::Form& a, const Value::Form& b) {
  if (a.kind != b.kind) return false;
  return a.structure == b.structure || a.structure->equals(*b.structure);
}

at::Tensor Value::tensor() const {
  if (form_.kind != Form::kTensor || tensors_.size() != 1) {
    throw std::invalid_argument("[gpipe] expected a single tensor, but this is " + describe());
  }
  return tensors_.front();
}

std::string Value::describe() const {
  if (form_.kind == Form::kObject) return form_.structure->describe();
  if (form_.kind == Form::kTensor) return tensors_.empty() ? "nothing" : "a tensor";
  return std::string(form_.kind == Form::kVector ? "a vector of " : "a tuple of ") + std::to_string(tensors_.size()) +
         " tensors";
}

}  // namespace gpipe
