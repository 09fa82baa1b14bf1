#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/action.h"
#include "gpipe/api.h"

namespace gpipe {

class GPIPE_API Ranks;

/// Options of a GPipe: GPipeOptions().chunks(8).checkpoint(gpipe::Checkpoint::kAlways).
struct GPipeOptions {
  /// One device per worker. A device can appear more than once. Surplus devices are ignored if each worker has one
  /// stage, and refused otherwise. Empty: the GPUs, or the CPU for all workers if there is no GPU.
  TORCH_ARG(std::vector<torch::Device>, devices);
  /// The schedule of step(): a name of schedule_rules() (gpipe/schedules.h), such as "1f1b" or "zb_v"; lists in the
  /// text form (gpipe/schedule_source.h), or "@FILE" with them; or "auto". forward() and its backward always fill and drain.
  ///
  /// "auto": the first step() measures, best with at least four micro-batches. Later steps have the schedule that the
  /// simulator finds fastest (GPipeImpl::schedule()), with the same bits: a named one, or lists for the measured times. On
  /// accelerators it needs no more memory than 1f1b, or than interleaved_1f1b for several stages per worker.
  TORCH_ARG(std::string, schedule) = kFillAndDrain;
  /// Stages on each worker: stage s is on worker s mod (stages / stages_per_worker). A schedule that needs a V and one
  /// from a file have their own placement. With fewer `devices` than stages, 1 gives an interleaved schedule and "auto"
  /// a worker per device.
  TORCH_ARG(int, stages_per_worker) = 1;
  /// The worker of each stage, numbered without gaps, instead of `stages_per_worker`. Such as v_placement(4). Stages
  /// that follow each other on a worker run as one, so that each can have its own checkpoint mode.
  TORCH_ARG(std::vector<int>, placement);
  /// Generates the schedules of step() instead of `schedule`. Called on threads that call step() and program(). Each R
  /// must come directly before its B or I among its stage's actions, W's aside.
  TORCH_ARG(ScheduleFunction, schedule_function);
  /// The number of micro-batches per mini-batch, at most one per sample; see micro_batch_sizes(). 1 is plain model
  /// parallelism.
  TORCH_ARG(std::int64_t, chunks) = 1;
  /// Samples per micro-batch, as an alternative to chunks, which must then be 1. 0: use chunks.
  TORCH_ARG(std::int64_t, split_size) = 0;
  /// Which micro-batches recompute their forward in training mode instead of storing its graph: in all stages, or per
  /// stage. A recompute gets the same inputs, buffers and random numbers. A layer whose output depends on other state
  /// that each forward changes needs kNever.
  TORCH_ARG(Checkpoints, checkpoint) = Checkpoint::kExceptLast;
  /// Updates the running statistics of batch norm once per mini-batch, from all its samples. Instance norms must not
  /// have any. In any case each micro-batch is normalized by its own statistics.
  TORCH_ARG(bool, deferred_batch_norm) = false;
  /// Threads that an operator of a CPU stage may use. 0: an equal share of torch::get_num_threads(), at least one.
  TORCH_ARG(int, intraop_threads) = 0;
  /// Whether the process keeps the memory of freed CPU tensors for others of the same size while the pipeline lives, at
  /// most 1.25 times what was in use at once. Sets PyTorch's allocator if this process has a CPU stage and the program
  /// has not set one.
  TORCH_ARG(bool, keep_memory) = true;
  /// The processes that run the pipeline together. Each has an equal share of the workers, in order. `devices` then has
  /// the devices of this rank's workers. Null: this process has all workers.
  TORCH_ARG(std::shared_ptr<Ranks>, ranks) = nullptr;
};

/// Returns the number of samples in each micro-batch: `chunks` of them, as equal as can be, as torch::tensor_split cuts
/// (10 in 4 are 3, 3, 2, 2); or, if `split_size` is positive, that many and the rest in the last, as torch::split cuts.
/// There are fewer, as equal as can be, where one would have less than `least` samples, unless `split_size` is less. (A
/// batch norm cannot train on one sample, so a pipeline that trains one passes 2.) An empty mini-batch has one empty
/// micro-batch. Errors: std::invalid_argument for negative numbers, chunks = 0 without a split_size, and more than
/// kMostCells micro-batches.
GPIPE_API std::vector<std::int64_t> micro_batch_sizes(std::int64_t samples, std::int64_t chunks,
                                                      std::int64_t split_size, std::int64_t least = 1);

/// Sets how many threads operators on this thread use. Unlike at::set_num_threads, this leaves all other threads alone.
GPIPE_API void set_intraop_threads_of_this_thread(int threads);

}  // namespace gpipe
