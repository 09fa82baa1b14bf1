#pragma once

#include <torch/arg.h>

#include "balance/model.h"
#include "balance/profile.h"
#include "gpipe/api.h"

namespace gpipe {

struct ProfileOptions {
  /// Stages that will run at once on the sample's device, and do so here: CPU stages slow each other down.
  TORCH_ARG(int, workers) = 1;
  /// Threads per operator on the CPU. 0: torch::get_num_threads() / workers, as in GPipeOptions.
  TORCH_ARG(int, intraop_threads) = 0;
  /// Time budget: no further run begins after so many seconds. About twelve steps of a few micro-batches always run.
  TORCH_ARG(double, seconds) = 10;
  /// Maximum number of measured runs of each pipeline; warm-up runs do not count.
  TORCH_ARG(int, repeats) = 9;
  /// Bytes of a parameter, its gradient and the optimizer's state, per byte: 2 for SGD, 3 with momentum, 4 for Adam.
  TORCH_ARG(double, param_scale) = 2;
  /// Whether stages on different devices can share parameters, as Python's can. If not, only CPU stages can.
  TORCH_ARG(bool, lends_between_devices) = false;
  /// Called on the calling thread with the fraction of the work done, rising from 0 to 1. May throw to stop.
  TORCH_ARG(std::function<void(double)>, progress);
};

/// Measures every layer of a model in training mode. The sample is one micro-batch; its size affects all results. Times
/// are shares of the median times of a real pipeline's stages, without the time that other programs take from the cores.
/// Bytes are counted exactly, in a run of each kind. Autocast is as on the calling thread. An input that requires grad gets
/// a gradient.
///
/// Restores parameters, gradients, buffers, devices, modes and the CPU's generator. Do not use the model meanwhile.
///
/// The sample's device must hold the model and the activations of three micro-batches, or of `workers` if that is more.
///
/// Errors: std::invalid_argument for invalid options or samples, and for models that GPipe refuses. std::runtime_error
/// that names the layer, with the layer's exception nested, if a layer fails, e.g. because the device's memory runs out.
/// std::runtime_error if a layer changes a parameter after its first forwards; that change is not undone.
GPIPE_API Profile profile(const Model& model, const Value& sample, const ProfileOptions& options = {});

}  // namespace gpipe
