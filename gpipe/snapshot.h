#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "gpipe/api.h"

namespace torch {
namespace nn {
class Module;
}
namespace optim {
class Optimizer;
}
}  // namespace torch

namespace gpipe {

// For any model, in a pipeline or not.

/// Tensors by their names in the unpartitioned model.
using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;
/// An optimizer's numbers and tensors, by their names in LibTorch and Python.
using Fields = std::map<std::string, c10::IValue>;

/// The state of an optimizer. Parameters are identified by name, so that it fits the model at any balance.
struct OptimizerState {
  struct Group {
    std::vector<std::string> params;
    Fields options;
  };
  std::string type;  ///< the class, such as "AdamW"
  std::vector<Group> param_groups;
  std::map<std::string, Fields> state;  ///< by parameter; only those that had a gradient so far
};

/// The state that a training run needs to continue as if it had never stopped.
struct Snapshot {
  NamedTensors model = NamedTensors("Tensor");  ///< parameters and buffers
  OptimizerState optimizer;
  std::int64_t epoch = 0;                              ///< epochs completed
  std::map<std::string, std::int64_t> position;        ///< in the epoch, as defined by the data loader
  at::Tensor random;                                   ///< state of the default CPU generator, the source of all seeds
  std::map<std::string, std::string> options;          ///< the program's options
  std::map<std::string, std::vector<double>> history;  ///< losses and scores so far
};

/// Writes a file in the safetensors format. The model's tensors have their own names, so that other programs read them:
///
///   weights = safetensors.torch.load_file("latest.snapshot")  # the names of other tensors begin with a dot
///
/// Tied tensors are written under each of their names. The path names the previous snapshot until this one is on the
/// disk. Errors: std::runtime_error with the path and the reason, also for a tensor that is not dense or has a type
/// that the format lacks, for text that is not UTF-8, and for an option that is not a finite number, a string or a
/// tuple of them. The path then names the previous file, unless only flushing its folder failed.
GPIPE_API void write_snapshot(const std::filesystem::path& path, const Snapshot& snapshot);

/// Reads a file from write_snapshot() or from Python's gpipe.snapshot.write. Errors: std::runtime_error with the path
/// and the reason for a file that is missing, not a regular file, changed, truncated, not a snapshot, or of a newer
/// version.
GPIPE_API Snapshot read_snapshot(const std::filesystem::path& path);

/// Reads the model's tensors of a snapshot or another safetensors file, such as of `safetensors.torch.save_file()`.
/// Errors: as read_snapshot().
GPIPE_API NamedTensors read_weights(const std::filesystem::path& path);

/// write_snapshot() and read_snapshot() in memory.
GPIPE_API std::string to_bytes(const Snapshot& snapshot);
GPIPE_API Snapshot from_bytes(std::string_view bytes);

/// Copies the parameters and buffers to the CPU, so that training can continue while they are written.
GPIPE_API NamedTensors capture_model(const torch::nn::Module& model);

/// Copies the tensors into the model's tensors, on their devices. Errors: std::invalid_argument for a name that only
/// the model or only the snapshot has, for different shapes, types or layouts, and for a tensor of the model that
/// cannot be written in place. The model is then unchanged.
GPIPE_API void restore_model(torch::nn::Module& model, const NamedTensors& saved);

/// Copies an optimizer's options and state to the CPU. Parameters are named as in the model. Errors:
/// std::invalid_argument for an optimizer that is not LibTorch's Adagrad, Adam, AdamW, RMSprop or SGD, or has a
/// parameter that is not the model's.
GPIPE_API OptimizerState capture_optimizer(const torch::optim::Optimizer& optimizer, const torch::nn::Module& model);

/// Sets an optimizer's options and state, on the parameters' devices. Errors: std::invalid_argument if the saved
/// optimizer is of another class or has other groups of parameters, or if an option or a parameter's state is missing
/// or does not fit. The optimizer is then unchanged.
GPIPE_API void restore_optimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& model,
                                 const OptimizerState& saved);

/// Returns the state of the default CPU generator.
GPIPE_API at::Tensor capture_random();

/// Sets the state of the default CPU generator. Errors: std::invalid_argument for a tensor that is not such a state.
/// The generator is then unchanged.
GPIPE_API void restore_random(const at::Tensor& saved);

}  // namespace gpipe
