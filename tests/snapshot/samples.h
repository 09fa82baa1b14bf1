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

/// Compares bit by bit.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const auto x = a.detach().resolve_conj().resolve_neg().contiguous();
  const auto y = b.detach().resolve_conj().resolve_neg().contiguous();
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

inline bool same_bits(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  return std::ranges::equal(a, b, [](const auto& one, const auto& other) { return same_bits(one, other); });
}

/// Copies of a model's parameters and buffers.
inline std::vector<torch::Tensor> copy_of(const torch::nn::Module& model) {
  std::vector<torch::Tensor> copies;
  for (const auto& all : {model.parameters(), model.buffers()}) {
    for (const auto& each : all) copies.push_back(each.detach().clone());
  }
  return copies;
}

}  // namespace gpipe
