#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <filesystem>
#include <string>

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

class GPipeImpl;

// A snapshot has the state that a training needs to continue as if it had never stopped. It is a folder:
//
// - one or two safetensors files per rank: the model's tensors on that rank, by their names in the unpartitioned model,
//   and the optimizer's
// - model.safetensors.index.json, Hugging Face's index of the model's tensors
// - snapshot.json, which describes the snapshot and has checksums. It is renamed last, so the folder has this snapshot,
//   or the one before, whenever the process is killed. Files of the one before are then removed.
//
// A snapshot fits the model at any balance, number of ranks and in one process, and each rank reads only what it needs.
// Python's gpipe.snapshot writes and reads the same.

/// Where a training is, as far as only the program knows.
struct Progress {
  std::int64_t step = 0;
  std::string extra = "null";  ///< JSON of the program's choice
};

/// Saves a model, the optimizer if one is given, and the state of the CPU's generator. For a pipeline all ranks call
/// it, with the same folder and rank 0's progress; it returns when the snapshot is whole on the disk. The optimizer has
/// the pipeline's parameters(). Errors, on all ranks: std::system_error with the path and the reason, with
/// operation_would_block if another writer is writing to the folder; std::invalid_argument for an optimizer that is not
/// LibTorch's Adagrad, Adam, AdamW, RMSprop or SGD, or has a parameter that is not the model's, for a tensor that is not
/// dense or has a type that the format lacks, and for an extra that is not JSON; std::runtime_error if ranks have
/// optimizers with other options, and on the other ranks. The folder then has the snapshot before.
GPIPE_API void save_snapshot(const std::filesystem::path& folder, GPipeImpl& pipe,
                             const torch::optim::Optimizer* optimizer = nullptr, const Progress& progress = {});
GPIPE_API void save_snapshot(const std::filesystem::path& folder, const torch::nn::Module& model,
                             const torch::optim::Optimizer* optimizer = nullptr, const Progress& progress = {});

/// Loads a model, the optimizer if one is given, and the state of the CPU's generator. Each rank gets its own generator
/// back; with another number of ranks, all get the first one's. Errors: std::runtime_error with the path and the reason for a
/// snapshot that is missing, damaged or of a newer version; std::invalid_argument for one of another model or
/// optimizer, or if a tensor of the model cannot be written in place. Model and optimizer are then unchanged, unless
/// the file of a tensor is damaged. An error on one rank leaves the others loaded.
GPIPE_API Progress load_snapshot(const std::filesystem::path& folder, GPipeImpl& pipe,
                                 torch::optim::Optimizer* optimizer = nullptr);
GPIPE_API Progress load_snapshot(const std::filesystem::path& folder, torch::nn::Module& model,
                                 torch::optim::Optimizer* optimizer = nullptr);

/// Reads only the progress. Errors: as load_snapshot().
GPIPE_API Progress read_progress(const std::filesystem::path& folder);

/// Reads the model's tensors of a snapshot or of a safetensors file, such as of `safetensors.torch.save_file()`.
/// Errors: as load_snapshot().
GPIPE_API torch::OrderedDict<std::string, at::Tensor> read_weights(const std::filesystem::path& path);

}  // namespace gpipe
