// Writes the masks that a trained U-Net predicts, as a pipeline, and scores them if the true masks are known.

#include <torch/nn/functional/upsampling.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <iostream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/common/files.h"
#include "examples/common/image.h"
#include "examples/common/plan.h"
#include "examples/common/resume.h"
#include "examples/unet/data.h"
#include "examples/unet/segmentation.h"
#include "gpipe/snapshot.h"

namespace gpipe::examples::unet {
namespace {

namespace fs = std::filesystem;

struct Options : PipelineOptions {
  fs::path model;
  std::vector<fs::path> input;
  fs::path data;
  fs::path output = "out/predict";
};

void add_options(CLI::App& app, Options& options) {
  options.batch_size = 4;
  options.stages = 1;  // measuring takes longer than predicting a few images
  add_pipeline_options(app, options);
  app.add_option("-m,--model", options.model, "snapshot of a training")->required()->always_capture_default(false);
  auto* images = app.add_option_group("images");
  images->add_option("-i,--input", options.input, "images, or folders of images (JPEG, PNG, GIF, TIFF)")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->always_capture_default(false);
  images
      ->add_option("--data", options.data,
                   "folder with imgs/NAME.jpg and masks/NAME_mask.png; also writes scores.csv, with Dice and IoU")
      ->always_capture_default(false);
  images->require_option(1);
  app.add_option("-o,--output", options.output, "folder for the masks, NAME_mask.png");
}

// Refuses images of the same name, because their masks would be the same file.
std::vector<Sample> list_inputs(const std::vector<fs::path>& inputs) {
  FilesByStem all;
  for (const auto& input : inputs) {
    const bool is_folder = fs::is_directory(input);
    for (const auto& [stem, image] : is_folder ? images_in(input) : FilesByStem{{input.stem().string(), input}}) {
      const auto [other, is_new] = all.emplace(stem, image);
      if (is_new) continue;
      throw std::runtime_error("two images have the same name: " + other->second.string() + " and " + image.string());
    }
  }
  std::vector<Sample> samples;
  for (const auto& [stem, image] : all) samples.push_back({image});
  return samples;
}

// Calls `use` for each sample with its number and its classes' probabilities, [1, classes, height, width], in the image's
// size.
void predict_all(const Options& options, const Identity& flags, const std::vector<Sample>& samples,
                 const std::function<void(std::size_t, const torch::Tensor&)>& use) {
  namespace F = torch::nn::functional;
  std::vector<Size> sizes;
  for (const auto& sample : samples) sizes.push_back(image_size(sample.image));
  ModelOptions model_options;
  double scale = 1;
  try {
    model_options = from_flags(flags);
    scale = std::stod(flags.at("--scale"));
  } catch (const std::logic_error& error) {
    throw std::runtime_error(options.model.string() + " is not a snapshot of unet_train: " + error.what());
  }
  auto model = make_model(model_options);
  load_snapshot(options.model, *model);
  model->eval();
  const Size first_size = scaled(sizes.at(0), scale);
  const auto sample = std::clamp<std::int64_t>(std::ssize(samples), 2, std::max<std::int64_t>(2, options.batch_size));
  auto pipe = cut_by_time(model, options, torch::rand({sample, 3, first_size.height, first_size.width}));
  pipe->eval();
  fs::create_directories(options.output);

  const torch::NoGradGuard no_grad;
  for (std::size_t begin = 0, end = 0; begin < samples.size(); begin = end) {
    // Consecutive images of the same size share batches.
    const Size size = scaled(sizes[begin], scale);
    std::vector<Sample> batch;
    while (end < samples.size() && scaled(sizes[end], scale) == size && std::ssize(batch) < options.batch_size) {
      batch.push_back({samples[end++].image});
    }
    const auto logits = pipe->forward(read_samples(batch, size, model_options.classes).input);
    const auto probabilities = logits.to(torch::kFloat).softmax(1).cpu();
    for (std::size_t image = begin; image < end; ++image) {
      const std::vector<std::int64_t> whole = {sizes[image].height, sizes[image].width};
      use(image, F::interpolate(probabilities.narrow(0, static_cast<std::int64_t>(image - begin), 1),
                                F::InterpolateFuncOptions().size(whole).mode(torch::kBilinear).align_corners(false)));
    }
  }
}

// Prints the scores of each image, of their mean and of all pixels, and writes them. `pairs` has the counts of each image.
void score(const Options& options, const std::vector<Sample>& samples, const std::vector<torch::Tensor>& pairs) {
  const auto classes = static_cast<int>(pairs.at(0).size(0));
  std::string csv = "image,dice,iou";
  for (int k = 1; classes > 2 && k < classes; ++k) absl::StrAppend(&csv, ",dice_", k, ",iou_", k);
  csv += "\n";
  const auto add_row = [&](const std::string& name, const torch::Tensor& scores) {
    csv += name;
    // With two classes, the mean over the classes is the only class.
    for (int k = 0; k < (classes == 2 ? 1 : classes); ++k) {
      absl::StrAppendFormat(&csv, ",%.6f,%.6f", scores[k][0].item<double>(), scores[k][1].item<double>());
    }
    csv += "\n";
    const double dice = scores[0][0].item<double>(), iou = scores[0][1].item<double>();
    std::cout << absl::StrFormat("%-24s dice %.4f, IoU %.4f\n", name, dice, iou);
  };
  std::vector<torch::Tensor> all;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    all.push_back(to_scores(pairs[i]));
    add_row(samples[i].image.stem().string(), all.back());
  }
  add_row("(mean of images)", torch::stack(all).mean(0));
  add_row("(all pixels)", to_scores(torch::stack(pairs).sum(0)));
  write_file(options.output / "scores.csv", csv);
}

int predict(const Options& options) {
  const auto flags = read_saved(options.model)["options"].get<Identity>();
  const auto samples = options.data.empty() ? list_inputs(options.input) : list_samples(options.data);
  std::vector<torch::Tensor> pairs;  // of each image with a true mask
  predict_all(options, flags, samples, [&](std::size_t number, const torch::Tensor& probabilities) {
    const auto& [image, mask] = samples[number];
    const auto classes = static_cast<int>(probabilities.size(1));
    const auto labels = to_labels(probabilities)[0][0];
    if (!mask.empty()) pairs.push_back(count_pairs(labels, read_labels(mask, classes), classes));
    write_png(options.output / (image.stem().string() + "_mask.png"), paint_labels(labels, classes));
  });
  if (!pairs.empty()) score(options, samples, pairs);
  std::cout << "wrote " << samples.size() << " masks to " << options.output.string() << "/" << std::endl;
  return 0;
}

}  // namespace
}  // namespace gpipe::examples::unet

int main(int argc, char** argv) {
  CLI::App app("Predicts masks of images with a trained U-Net, as a pipeline, and scores them with --data.");
  gpipe::examples::unet::Options options;
  gpipe::examples::unet::add_options(app, options);
  return gpipe::examples::run_program(app, argc, argv, [&] { return gpipe::examples::unet::predict(options); });
}
