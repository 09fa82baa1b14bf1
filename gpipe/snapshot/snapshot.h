#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace torch {
namespace nn {
class Module;
}
namespace optim {
class Optimizer;
}
}  // namespace torch

namespace gpipe {

// A room of its own in gpipe/, below everything else there. It needs torch alone: it serves any model, in a pipeline or
// not, and a program that only loads weights needs no pipeline.

/// Tensors by the names that the unpartitioned model gives them.
using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;
/// An optimizer's numbers and tensors by the names that LibTorch's and Python's classes give them.
using Fields = std::map<std::string, c10::IValue>;

/// An optimizer with its parameters by name, so that it fits the model at any balance.
struct OptimizerState {
  struct Group {
    std::vector<std::string> params;
    Fields options;
  };
  std::string type;  ///< the class, such as "AdamW"
  std::vector<Group> param_groups;
  std::map<std::string, Fields> state;  ///< of parameters that had a gradient already
};

/// All that a training needs to go on as if it had never stopped. A value: nothing of it is shared with the model, so
/// that it can be written while training goes on.
struct Snapshot {
  NamedTensors model = NamedTensors("Tensor");  ///< parameters and buffers
  OptimizerState optimizer;
  std::int64_t epoch = 0;                              ///< epochs completed
  std::map<std::string, std::int64_t> position;        ///< where in the epoch the loader is, in its own terms
  at::Tensor random;                                   ///< of the default CPU generator, from which all seeds are drawn
  std::map<std::string, std::string> options;          ///< the program's, as given
  std::map<std::string, std::vector<double>> history;  ///< losses and scores so far
};

/// Writes a dict with the names of the fields above as keys, and "format" and "version", in the form of torch.save:
///
///   state = torch.load("latest.snapshot", weights_only=True)
///   model.load_state_dict(state["model"])
///
/// The path names a whole snapshot at all times: the previous one until this one is on the disk (see AtomicFile).
/// Errors: std::runtime_error with the path and the reason. The path then names the previous file or, where only the
/// folder could not be flushed after the rename, the new one. Tensors must be dense, of a type that LibTorch and Python
/// save alike: bool, uint8, int8 to int64, half, bfloat16, float, double, or complex of the last two.
void write_snapshot(const std::filesystem::path& path, const Snapshot& snapshot);

/// Reads what write_snapshot wrote, or Python's gpipe.snapshot.write, or torch.save of an equal dict in which no list
/// or dict stands twice. Executes nothing, whatever is in the file. Time and memory are proportional to the file's size.
/// Errors: std::runtime_error with the path and the reason, for a file that is missing, not a regular file, damaged,
/// cut short, not a snapshot, or of a newer version.
Snapshot read_snapshot(const std::filesystem::path& path);

/// Copies of the parameters and buffers, on the CPU.
NamedTensors capture_model(const torch::nn::Module& model);

/// Copies the tensors into the model's own, on their devices. Errors: std::invalid_argument for the first name that
/// only one of them has, or whose shape, type or layout differs, and for a tensor of the model that cannot be written in
/// place; the model is then as it was.
void restore_model(torch::nn::Module& model, const NamedTensors& saved);

/// Copies of an optimizer's options and state. The model names its parameters. Errors: std::invalid_argument for an
/// optimizer other than LibTorch's Adagrad, Adam, AdamW, RMSprop and SGD, or with a parameter that is not the model's.
OptimizerState capture_optimizer(const torch::optim::Optimizer& optimizer, const torch::nn::Module& model);

/// Makes an optimizer of the same class over the same groups of parameters what the saved one was. Errors:
/// std::invalid_argument where they differ, or a parameter's state is incomplete; the optimizer is then as it was.
void restore_optimizer(torch::optim::Optimizer& optimizer, const torch::nn::Module& model, const OptimizerState& saved);

/// The state of the default CPU generator.
at::Tensor capture_random();

/// Errors: std::invalid_argument for what is not such a state; the generator is then as it was.
void restore_random(const at::Tensor& saved);

}  // namespace gpipe
