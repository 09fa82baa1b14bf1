// Shared by the tests of snapshots. torch/torch.h includes most headers of C++.
#pragma once

#include <torch/torch.h>

#include <fstream>

#include "gpipe/snapshot.h"
#include "tests/support/matchers.h"

namespace gpipe {

inline std::string bytes_of(const std::filesystem::path& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(bytes).str();
}

inline void write_bytes(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline torch::nn::Sequential sample_model() {
  return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Dropout(0.5),
                               torch::nn::Linear(torch::nn::LinearOptions(4, 2).bias(false)));
}

/// One training step on random data from the default generator.
template <class Model>
void train(Model& model, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  model->forward(torch::randn({6, 3})).square().sum().backward();
  optimizer.step();
}

/// A snapshot of sample_model() after two steps, with values of every kind.
inline Snapshot small_snapshot() {
  auto model = sample_model();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1).amsgrad(true));
  train(model, optimizer);
  train(model, optimizer);
  Snapshot snapshot;
  snapshot.model = capture_model(*model);
  snapshot.optimizer = capture_optimizer(optimizer, *model);
  snapshot.epoch = 7;
  snapshot.position = {{"batch", 3}, {"seed", -70000}};
  snapshot.random = capture_random();
  snapshot.options = {{"data", "a folder/ä"}, {"empty", ""}};
  snapshot.history = {{"loss", {0.1, 1e-300, 2.0}}, {"dice", {1.0 / 3}}, {"nothing", {}}};
  return snapshot;
}

/// Compares bit by bit.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const auto x = a.detach().resolve_conj().resolve_neg().contiguous();
  const auto y = b.detach().resolve_conj().resolve_neg().contiguous();
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

inline bool same_bits(const NamedTensors& a, const NamedTensors& b) {
  return a.size() == b.size() && std::ranges::all_of(a, [&](const auto& item) {
           return b.contains(item.key()) && same_bits(item.value(), b[item.key()]);
         });
}

inline bool same_bits(const Fields& a, const Fields& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    if (x.first != y.first) return false;
    if (x.second.isTensor() && y.second.isTensor()) return same_bits(x.second.toTensor(), y.second.toTensor());
    return x.second == y.second;
  });
}

inline bool same_bits(const OptimizerState& a, const OptimizerState& b) {
  const auto same_groups = [](const auto& x, const auto& y) {
    return x.params == y.params && same_bits(x.options, y.options);
  };
  const auto same_states = [](const auto& x, const auto& y) {
    return x.first == y.first && same_bits(x.second, y.second);
  };
  return a.type == b.type && std::ranges::equal(a.param_groups, b.param_groups, same_groups) &&
         std::ranges::equal(a.state, b.state, same_states);
}

inline bool same_bits(const Snapshot& a, const Snapshot& b) {
  return same_bits(a.model, b.model) && same_bits(a.optimizer, b.optimizer) && a.epoch == b.epoch &&
         a.position == b.position && same_bits(a.random, b.random) && a.options == b.options && a.history == b.history;
}

}  // namespace gpipe
