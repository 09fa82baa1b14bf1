#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstddef>
#include <string>
#include <vector>

#include "balance/profile.h"
#include "examples/gpipe_balance/options.h"

namespace gpipe::examples::balance {

/// Returns a file's text. Errors: std::runtime_error for a file that cannot be read, std::invalid_argument for one of more
/// than `most` bytes.
std::string read_text(const std::string& path, std::size_t most);

/// The values of --model.
std::vector<std::string> model_names();

/// Creates the model that the options name. Errors: std::invalid_argument for more stages than layers.
torch::nn::Sequential make_model(const Options& options);

/// A mini-batch of random images on the first device.
torch::Tensor make_batch(const Options& options);

/// Profiles the model, with its progress on standard error, or reads the file of --profile. Errors: those of profile(),
/// and std::invalid_argument or std::runtime_error for a file that cannot be read, is not a profile, or does not match
/// the options.
Profile profile_of(const Options& options, int chunks);

}  // namespace gpipe::examples::balance
