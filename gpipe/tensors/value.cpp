#include "gpipe/value.h"

#include "gpipe/base/checks.h"

namespace gpipe {

bool operator==(const Value::Form& a, const Value::Form& b) {
  if (a.kind != b.kind) return false;
  return a.structure == b.structure || a.structure->equals(*b.structure);
}

at::Tensor Value::tensor() const {
  if (form_.kind != Form::kTensor || tensors_.size() != 1) {
    refuse_argument("expected a single tensor, but this is ", describe());
  }
  return tensors_.front();
}

std::string Value::describe() const {
  if (form_.kind == Form::kObject) return form_.structure->describe();
  if (form_.kind == Form::kTensor) return tensors_.empty() ? "nothing" : "a tensor";
  return absl::StrCat(form_.kind == Form::kVector ? "a vector of " : "a tuple of ", tensors_.size(), " tensors");
}

}  // namespace gpipe
