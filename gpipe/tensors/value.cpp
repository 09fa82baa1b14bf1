#include "gpipe/value.h"

#include "gpipe/base/checks.h"

namespace gpipe {

void Value::refuse() const { refuse_argument("expected a single tensor, but this is ", describe()); }

std::string Value::describe() const {
  if (form_.kind == Form::kObject) return form_.structure->describe();
  if (form_.kind == Form::kTensor) return tensors_.empty() ? "nothing" : "a tensor";
  return absl::StrCat(form_.kind == Form::kVector ? "a vector of " : "a tuple of ", tensors_.size(), " tensors");
}

}  // namespace gpipe
