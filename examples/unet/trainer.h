#pragma once

#include <torch/optim/adam.h>

#include <filesystem>
#include <iosfwd>
#include <vector>

#include "examples/unet/carvana.h"
#include "examples/unet/history.h"
#include "examples/unet/image.h"
#include "examples/unet/options.h"
#include "gpipe/gpipe.h"

namespace gpipe::unet {

/// Trains and validates a pipeline on samples, reporting to a stream and writing into options.output.
class Trainer {
 public:
  /// `pipe` maps [n, 3, h, w] to logits [n, 1, h, w]. `terminal`: draw a progress bar.
  Trainer(GPipe pipe, Split split, Size size, Options options, std::ostream& out, bool terminal);

  /// All epochs. Returns what each gave.
  std::vector<EpochRecord> run();

  /// The files written so far, in order.
  const std::vector<std::filesystem::path>& files() const { return files_; }

 private:
  /// Mean loss; images/s in `record`.
  void train(EpochRecord& record);
  void validate(EpochRecord& record);
  void write_trace(const Timeline& timeline);

  GPipe pipe_;
  const Split split_;
  const Size size_;
  const Options options_;
  std::ostream& out_;
  const bool terminal_;
  torch::optim::Adam optimizer_;
  std::vector<std::filesystem::path> files_;
  long step_ = 0;
};

/// Binary cross-entropy of logits plus 1 - Dice of their probabilities, each a mean over the batch. Shapes as equal.
torch::Tensor segmentation_loss(const torch::Tensor& logits, const torch::Tensor& masks);

}  // namespace gpipe::unet
