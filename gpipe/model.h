#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "gpipe/api.h"
#include "gpipe/options.h"
#include "gpipe/value.h"

namespace gpipe {

/// Reads a model that `python -m gpipe export` has written: any PyTorch model, as layers that run without Python, in
/// training mode. Train them in a pipeline:
///
///   auto model = gpipe::load_model("resnet50.gpipe");
///   auto pipe = gpipe::GPipe(model, {85, 73}, gpipe::GPipeOptions().chunks(8).schedule("1f1b"));
///
/// Without a pipeline, a layer takes and returns a Value: model->forward<gpipe::Value>(gpipe::Value(images)).
///
/// Make optimizers of pipe->parameters(): model->parameters() repeats tied tensors.
///
/// The format: a safetensors file with the original's state by its names. The names of constants and of buffers that
/// are not part of the state begin with a dot. The metadata text "model" is a JSON object: "version", 1, and "layers",
/// objects with "name", "tensors", "graph", which graph/graph.h describes, and "evaluation", the paths of the
/// modules that are in evaluation mode. A tensor is a list of its name in the file, whether it is "parameter", "frozen"
/// (a parameter that does not require grad) or "buffer", and the name of an earlier tensor that it is tied to, or null.
///
/// A model file is a program. It calls PyTorch's operators of the namespaces aten and prims, which reach no files and no
/// other processes, and those of `namespaces`, such as "torchvision". They take any memory and time, and internal ones,
/// whose names begin with an underscore, do not check their arguments: read only files that you trust.
///
/// Errors: std::runtime_error with the path and the reason for a file that is missing, damaged, not a model, of a newer
/// version, or calls an operator of another namespace, or one that this torch lacks.
GPIPE_API torch::nn::Sequential load_model(const std::filesystem::path& path,
                                           const std::vector<std::string>& namespaces = {});

/// Reads the tensors of this rank's layers only, for a pipeline with this balance and these options. The tensors of other
/// ranks' layers are on the meta device. Errors: also for invalid options, as the constructor of GPipe.
GPIPE_API torch::nn::Sequential load_model(const std::filesystem::path& path, const std::vector<std::int64_t>& balance,
                                           const GPipeOptions& options,
                                           const std::vector<std::string>& namespaces = {});

/// Writes a model from load_model() with its present tensors, atomically; also a pipeline of its layers in one process.
/// `safetensors.torch.load_file()` reads the weights for the original: model.load_state_dict(weights, strict=False).
/// Errors: std::invalid_argument for a module with other layers, or without some; std::system_error.
GPIPE_API void save_model(const std::filesystem::path& path, const torch::nn::Module& model);

}  // namespace gpipe
