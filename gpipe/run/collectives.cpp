// The calls over ranks that train nothing.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/gradients.h"
#include "gpipe/run/call.h"

namespace gpipe {
namespace {

void check_positive(GPipeImpl& pipe, double value, const std::string& name) {
  if (value > 0) return;
  const auto error = name + " must be positive, but is " + std::to_string(value);
  pipe.team().withdraw(error);
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

std::vector<std::string> TeamCalls::gather(std::string bytes, const std::string& what) {
  if (pipeline_.team().size() == 1) return {std::move(bytes)};
  return in_call(pipeline_, [&](Call& call) {
    call.agree({.key = {.name = "gather of " + what}});
    return pipeline_.team().gather(std::move(bytes));
  });
}

std::string TeamCalls::share(std::string bytes) {
  auto& team = pipeline_.team();
  if (team.size() == 1) return bytes;
  return in_call(pipeline_, [&](Call& call) {
    call.agree({.key = {.name = "share of the last stage's bytes"}});
    Parcel parcel;
    parcel.add(at::from_blob(bytes.data(), {std::ssize(bytes)}, at::kByte), /*gradient_wanted=*/false);
    parcel = team.broadcast(Team::Group::kReplica, pipeline_.rank_of(pipeline_.count() - 1), std::move(parcel));
    const auto& shared = parcel.tensors.front();
    return std::string(static_cast<const char*>(shared.const_data_ptr()), shared.nbytes());
  });
}

Timeline TeamCalls::gather(Timeline timeline) {
  auto& team = pipeline_.team();
  if (team.size() == 1) return timeline;
  return in_call(pipeline_, [&](Call& call) -> Timeline {
    call.agree({.key = {.name = "gather of a timeline"}});
    const auto clocks = team.clocks();
    const auto all = team.gather(to_bytes(timeline.spans));
    const auto layers = team.gather(to_bytes(timeline.layers));
    if (all.empty()) return {};
    timeline.replicas = team.replicas();
    timeline.workers *= team.replicas();
    for (int r = 1; r < std::ssize(all); ++r) {
      // The ranks of one host have the same clock.
      const double ahead = std::abs(clocks[r].ahead) <= clocks[r].error ? 0 : clocks[r].ahead;
      for (auto& span : to_items<Span>(all[r])) {
        span.start -= ahead;
        span.end -= ahead;
        span.worker += team.replica_of(r) * pipeline_.workers();
        timeline.spans.push_back(span);
      }
    }
    for (int r = 1; r < std::ssize(layers); ++r) {
      if (team.replica_of(r) > 0) continue;
      for (const auto& layer : to_items<LayerTime>(layers[r])) timeline.layers.push_back(layer);
    }
    std::ranges::stable_sort(timeline.layers, {}, &LayerTime::stage);
    return std::move(timeline);
  });
}

std::uint64_t TeamCalls::largest(std::uint64_t number) {
  if (pipeline_.team().size() == 1) return number;
  return in_call(pipeline_,
                 [&](Call& call) { return call.agree({.key = {.name = "largest"}, .number = number}).largest; });
}

std::vector<double> TeamCalls::sum_over_replicas(std::vector<double> numbers) {
  auto& team = pipeline_.team();
  if (team.size() == 1) return numbers;
  return in_call(pipeline_, [&](Call& call) {
    call.agree({.key = {.name = absl::StrCat("sum of ", numbers.size(), " numbers over replicas")}});
    const auto of_ranks = team.gather(to_bytes(numbers));
    std::vector<double> sums(numbers.size());
    for (int replica = 0; !of_ranks.empty() && replica < team.replicas(); ++replica) {
      const auto of_replica = to_items<double>(of_ranks[team.mesh().rank_at(/*position=*/0, replica)]);
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += of_replica.at(i);
    }
    return to_items<double>(team.share(to_bytes(sums)));
  });
}

std::vector<double> TeamCalls::of_all_parameters(std::vector<double> numbers, const std::string& what) {
  return in_call(pipeline_, [&](Call& call) {
    const auto own = std::ssize(pipe_.parameters());
    if (std::ssize(numbers) != own) {
      refuse_argument("there must be one number per parameter, ", own, ", but there are ", numbers.size());
    }
    if (pipeline_.team().size() == 1) return numbers;
    const auto known = std::ranges::count_if(pipe_.parameter_names(), [&](const auto& each) {
      return each.name == each.first && pipeline_.is_here(each.stage);
    });
    if (own != known) {
      refuse_argument("the layers of this rank have ", own, " parameters, but had ", known,
                      " when the pipeline was made; make a new pipeline on all ranks");
    }
    call.agree({.key = {.name = what + " of all parameters"}});
    auto& team = pipeline_.team();
    std::vector<std::vector<double>> of_ranks;
    for (const auto& bytes : team.gather(to_bytes(numbers))) of_ranks.push_back(to_items<double>(bytes));
    std::vector<double> all;
    std::vector<std::size_t> next(of_ranks.size());
    for (const auto& [name, stage, first] : pipe_.parameter_names()) {
      const int owner = pipeline_.rank_of(stage);
      if (name == first && !of_ranks.empty()) all.push_back(of_ranks[owner].at(next[owner]++));
    }
    const auto& places = pipeline_.binding().parameter_places;
    if (!places.empty() && !all.empty()) {
      const auto in_layers = all;
      for (std::size_t p = 0; p < all.size(); ++p) all.at(places.at(p)) = in_layers[p];
    }
    return to_items<double>(team.share(to_bytes(all)));
  });
}

void TeamCalls::withdraw(const std::string& reason) {
  auto& team = pipeline_.team();
  if (team.size() == 1) return;
  const Turn turn(pipeline_);
  team.withdraw(reason);
}

void TeamCalls::note_load() { pipeline_.calls().has_loaded = true; }

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
  const auto values = pipe.team().of_all_parameters(read_all(norms), "norms of type " + std::to_string(norm_type));
  types = pipe.team().of_all_parameters(std::move(types));
  norms.clear();
  for (std::size_t p = 0; p < types.size(); ++p) {
    if (types[p] == kNoGradient) continue;
    norms.push_back(at::scalar_tensor(values[p], static_cast<at::ScalarType>(types[p])));
  }
  const auto total = norms.empty() ? at::zeros({}) : at::linalg_vector_norm(at::stack(norms), norm_type);
  const double value = read_all({total}).front();
  if (error_if_nonfinite && !std::isfinite(value)) {
    throw_error("the total norm of the gradients is ", std::to_string(value), ", so they cannot be clipped");
  }
  const auto factor = (total + 1e-6).reciprocal().mul_(max_norm).clamp_max_(1);
  std::map<std::string, at::Tensor> of_devices;
  for (const auto& parameter : pipe.parameters()) {
    if (!parameter.grad().defined()) continue;
    auto& of_device = of_devices[parameter.device().str()];
    if (!of_device.defined()) {  // not a copy, for which the host would wait
      of_device = at::full({}, read_all({factor}).front(), factor.options().device(parameter.device()));
    }
    parameter.mutable_grad().mul_(of_device);
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
  const bool all_finite = std::ranges::count(of_rank, 0.0) == 0;
  return pipe.team().largest(all_finite ? 0 : 1) == 0;
}

}  // namespace gpipe
