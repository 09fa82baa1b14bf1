#include "examples/common/autocast.h"

#include <ATen/autocast_mode.h>

namespace gpipe::examples {

Autocast::Autocast(bool enabled, const std::vector<torch::Device>& devices) {
  if (!enabled) return;
  for (const auto& device : devices) {
    const auto type = device.type();
    previous_.push_back({type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
    at::autocast::set_autocast_enabled(type, true);
    at::autocast::set_autocast_dtype(type, torch::kBFloat16);
  }
}

Autocast::~Autocast() {
  for (auto mode = previous_.rbegin(); mode != previous_.rend(); ++mode) {
    at::autocast::set_autocast_enabled(mode->type, mode->enabled);
    at::autocast::set_autocast_dtype(mode->type, mode->dtype);
  }
}

}  // namespace gpipe::examples
