// Trains a U-Net on files in the layout of the Carvana data set, as a pipeline.

#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/image.h"
#include "examples/common/trainer.h"
#include "examples/unet/data.h"
#include "examples/unet/segmentation.h"

namespace gpipe::examples::unet {
namespace {

struct Options : TrainingOptions {
  std::string data = "synthetic";
  int samples = 400;
  std::string size = "192x128";
  double scale = 0.5;
  double validation = 10;  // percent
  ModelOptions model;
};

void add_options(CLI::App& app, Options& options) {
  options.output = "out/unet";
  options.epochs = 24;
  options.batch_size = 8;
  options.learning_rate = 5e-3;
  add_training_options(app, options);
  app.add_option("--data", options.data,
                 "folder with imgs/NAME.jpg and masks/NAME_mask.png, or 'synthetic', which draws such files");
  app.add_option("--samples", options.samples, "number of images that 'synthetic' draws")->check(in_range(2, 9999));
  app.add_option("--size", options.size, "size of the images that 'synthetic' draws, in pixels");
  app.add_option("-s,--scale", options.scale, "size of the training images, relative to the files")
      ->check(in_range(0.001, 1));
  app.add_option("-v,--validation", options.validation, "percentage of the images that is kept for validation")
      ->check(in_range(0.01, 99));
  app.add_option("-c,--classes", options.model.classes,
                 "number of classes, with the background; masks of more than two are coloured")
      ->check(in_range(2, kMaxClasses));
  app.add_option("--depth", options.model.depth, "how often the U-Net halves the resolution")->check(in_range(1, 16));
  app.add_option("--channels", options.model.channels, "channels of the U-Net at full resolution")
      ->check(in_range(1, 4096));
}

std::vector<std::string> score_names(int classes) {
  std::vector<std::string> names = {"val_dice", "val_iou"};
  for (int k = 1; k < classes && classes > 2; ++k) names.push_back(absl::StrCat("val_dice_", k));
  return names;
}

/// Learns to segment images [n, 3, h, w] with values 0 to 1 into logits; see segmentation.h.
class SegmentationTask : public Task {
 public:
  SegmentationTask(Split split, Size size, const Options& options)
      : split_(std::move(split)), size_(size), options_(options) {}

  std::int64_t training_images() const override { return static_cast<std::int64_t>(split_.training.size()); }
  std::int64_t validation_images() const override { return static_cast<std::int64_t>(split_.validation.size()); }

  Example read(const torch::Tensor& numbers, int epoch) const override {
    std::vector<Sample> samples;
    for (std::int64_t i = 0; i < numbers.numel(); ++i) {
      const auto number = static_cast<std::uint64_t>(numbers[i].item<std::int64_t>());
      samples.push_back(epoch > 0 ? split_.training[number] : split_.validation[number]);
    }
    return read_samples(samples, size_, options_.model.classes);
  }

  torch::Tensor loss(const torch::Tensor& logits, const torch::Tensor& labels) const override {
    return segmentation_loss(logits, labels);
  }

  void add(const Example& example, const torch::Tensor& logits, const std::filesystem::path& picture) override {
    const auto labels = to_labels(logits);
    if (!picture.empty()) draw(picture, example, labels);
    pairs_ += count_pairs(labels, example.target, options_.model.classes);
  }

  std::vector<double> take_scores() override {
    const auto scores = to_scores(pairs_);
    pairs_.zero_();
    std::vector<double> values = {scores[0][0].item<double>(), scores[0][1].item<double>()};
    for (int k = 1; k < scores.size(0) && scores.size(0) > 2; ++k) values.push_back(scores[k][0].item<double>());
    return values;
  }

 private:
  // Draws the first images of a batch, their masks and the predicted ones.
  void draw(const std::filesystem::path& path, const Example& batch, const torch::Tensor& labels) const {
    const auto rows = std::min<std::int64_t>(6, batch.input.size(0));
    const auto painted = [&](const torch::Tensor& of) {
      const auto colors = class_colors(options_.model.classes).to(torch::kFloat) / 255;
      return colors.index({of.slice(0, 0, rows).squeeze(1).to(torch::kLong)}).permute({0, 3, 1, 2});
    };
    write_png(path, draw_table({batch.input.slice(0, 0, rows), painted(batch.target), painted(labels)}));
  }

  const Split split_;
  const Size size_;
  const Options& options_;
  torch::Tensor pairs_ = torch::zeros({options_.model.classes, options_.model.classes}, torch::kLong);
};

int train(const Options& options) {
  const bool drawn = options.data == "synthetic";
  const auto data = drawn ? options.output / absl::StrCat("synthetic_", options.samples, "_", options.size, "_",
                                                          options.model.classes)
                          : std::filesystem::path(options.data);
  Program program{.identity = to_flags(options.model), .scores = score_names(options.model.classes)};
  program.identity["--validation"] = absl::StrCat(options.validation);
  program.identity["--scale"] = absl::StrCat(options.scale);
  program.make_model = [&] { return make_model(options.model); };
  const auto drawn_size = drawn ? to_size(options.size) : Size();
  program.prepare = [&] {
    if (drawn) write_scenes(data, options.samples, drawn_size, options.seed, options.model.classes);
    check_masks(list_samples(data), options.model.classes);
  };
  program.load = [&] {
    const auto parts = split(list_samples(data), options.validation, options.seed);
    const auto size = scaled(image_size(parts.training.front().image), options.scale);
    std::cout << "data: " << parts.training.size() << " images to train, " << parts.validation.size()
              << " to validate, at " << to_string(size) << ", " << options.model.classes << " classes\n";
    return std::make_unique<SegmentationTask>(parts, size, options);
  };
  return run_training(options, program);
}

}  // namespace
}  // namespace gpipe::examples::unet

int main(int argc, char** argv) {
  CLI::App app("Trains a U-Net to segment images, as a pipeline over several devices.");
  gpipe::examples::unet::Options options;
  gpipe::examples::unet::add_options(app, options);
  return gpipe::examples::run_program(app, argc, argv, [&] { return gpipe::examples::unet::train(options); });
}
