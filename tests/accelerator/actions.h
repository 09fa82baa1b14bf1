#pragma once

#include <ATen/record_function.h>

namespace gpipe::accelerator {

/// Names the actions of pipelines in violations and counts, for its lifetime: listens to their ranges for profilers.
class ActionListener {
 public:
  ActionListener();
  ~ActionListener();
  ActionListener(const ActionListener&) = delete;
  ActionListener& operator=(const ActionListener&) = delete;

 private:
  const at::CallbackHandle handle_;
};

}  // namespace gpipe::accelerator
