#pragma once

#include <torch/arg.h>

#include <functional>

#include "balance/model.h"
#include "balance/profile.h"
#include "gpipe/autograd/value.h"

namespace gpipe {

struct ProfileOptions {
  /// Stages that will run at the same time on the sample's device. CPU stages share caches and memory and slow each
  /// other: what a layer takes is measured while so many run.
  TORCH_ARG(int, workers) = 1;
  /// Threads that one operator of a CPU layer may use; 0: torch::get_num_threads() shared equally among the workers, as
  /// in GPipeOptions.
  TORCH_ARG(int, intraop_threads) = 0;
  /// After so many seconds no further run is begun; the first ones, some ten steps of a few micro-batches, are made in
  /// any case.
  TORCH_ARG(double, seconds) = 10;
  /// Runs that count, at most.
  TORCH_ARG(int, repeats) = 9;
  /// Bytes that training needs for each byte of a parameter that requires grad: the parameter, its gradient and what
  /// the optimizer keeps. 2 for plain SGD, 3 with momentum, 4 for Adam.
  TORCH_ARG(double, param_scale) = 2;
  /// Told, on the calling thread, what part of the work is done, from 0 to 1, rising.
  TORCH_ARG(std::function<void(double)>, progress);
};

/// Measures every layer of a model, in training mode, for micro-batches of the sample's size (which moves the figures):
/// times are medians over runs of a real pipeline, after one to warm up; bytes are counted, exactly, in one. The model
/// is left as it was: parameters, gradients, buffers, devices, modes, and the default generator of the CPU; it must not
/// be used meanwhile. It must fit the sample's device together with the activations of three micro-batches, or of as
/// many as there are workers; on a GPU whose memory runs out, it is measured a layer at a time. Autocast is as on the
/// calling thread; an input that requires grad has one.
///
/// Errors: std::invalid_argument for options or a sample that make no sense, and for a model that GPipe refuses;
/// std::runtime_error, with what a layer threw nested in it, when one fails or does not fit alone: it names the layer.
/// std::runtime_error, too, for a layer that changes a parameter in a forward after its first ones: that stays changed.
Profile profile(const Model& model, const Value& sample, const ProfileOptions& options = {});

}  // namespace gpipe
