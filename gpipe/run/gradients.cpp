#include "gpipe/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

void check_positive(GPipeImpl& pipe, double value, const std::string& name) {
  if (value > 0) return;
  const auto error = name + " must be positive, but is " + std::to_string(value);
  pipe.withdraw(error);
  refuse_argument(error);
}

// Reads scalars of any devices. The host waits once per device.
std::vector<double> read_all(const std::vector<at::Tensor>& scalars) {
  std::map<std::string, std::pair<std::vector<at::Tensor>, std::vector<std::size_t>>> of_devices;
  for (std::size_t i = 0; i < scalars.size(); ++i) {
    auto& [numbers, places] = of_devices[scalars[i].device().str()];
    numbers.push_back(scalars[i].to(at::kDouble));
    places.push_back(i);
  }
  std::vector<double> values(scalars.size());
  for (const auto& [device, of_device] : of_devices) {
    const auto& [numbers, places] = of_device;
    const auto read = at::stack(numbers).to(at::kCPU);
    for (std::size_t k = 0; k < places.size(); ++k) values[places[k]] = read.const_data_ptr<double>()[k];
  }
  return values;
}

}  // namespace

at::Tensor clip_grad_norm_(GPipeImpl& pipe, double max_norm, double norm_type, bool error_if_nonfinite) {
  check_positive(pipe, max_norm, "max_norm");
  check_positive(pipe, norm_type, "norm_type");
  at::NoGradGuard no_grad;
  constexpr double kNoGradient = -1;
  std::vector<at::Tensor> norms;
  std::vector<double> types;
  for (const auto& parameter : pipe.parameters()) {
    const auto& gradient = parameter.grad();
    norms.push_back(gradient.defined() ? gradient.norm(norm_type) : at::zeros({}));
    types.push_back(gradient.defined() ? static_cast<double>(norms.back().scalar_type()) : kNoGradient);
  }
  const auto values = pipe.of_all_parameters(read_all(norms), "norms of type " + std::to_string(norm_type));
  types = pipe.of_all_parameters(std::move(types));
  norms.clear();
  for (std::size_t p = 0; p < types.size(); ++p) {
    if (types[p] == kNoGradient) continue;
    norms.push_back(at::scalar_tensor(values[p], static_cast<at::ScalarType>(types[p])));
  }
  const auto total = norms.empty() ? at::zeros({}) : at::linalg_vector_norm(at::stack(norms), norm_type);
  const double value = read_all({total}).front();
  if (error_if_nonfinite && !std::isfinite(value)) {
    throw std::runtime_error("[gpipe] the total norm of the gradients is " + std::to_string(value) +
                             ", so they cannot be clipped");
  }
  const auto factor = (total + 1e-6).reciprocal().mul_(max_norm).clamp_max_(1);
  for (const auto& parameter : pipe.parameters()) {
    if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor.to(parameter.device()));
  }
  return total;
}

bool unscale_grads_(GPipeImpl& pipe, double scale) {
  check_positive(pipe, scale, "scale");
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> finite;
  for (const auto& parameter : pipe.parameters()) {
    if (!parameter.grad().defined()) continue;
    auto& gradient = parameter.mutable_grad();
    gradient.mul_(1 / scale);
    finite.push_back(at::isfinite(gradient.is_sparse() ? gradient._values() : gradient).all());
  }
  const auto of_rank = read_all(finite);
  const bool all_finite = std::find(of_rank.begin(), of_rank.end(), 0.0) == of_rank.end();
  return pipe.largest(all_finite ? 0 : 1) == 0;
}

}  // namespace gpipe
