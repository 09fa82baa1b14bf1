// Scores a trained U-Net on images with masks, as a pipeline.

#include <CLI/CLI.hpp>
#include <iostream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/common/files.h"
#include "examples/common/resume.h"
#include "examples/unet/data.h"
#include "examples/unet/predictor.h"
#include "examples/unet/segmentation.h"

namespace gpipe::examples::unet {
namespace {

struct Options : PredictorOptions {
  std::filesystem::path data;
  std::string part = "all";
};

void add_options(CLI::App& app, Options& options) {
  options.output = "out/evaluate";
  add_predictor_options(app, options, "folder for scores.csv");
  app.add_option("--data", options.data, "folder with imgs/NAME.jpg and masks/NAME_mask.png")
      ->required()
      ->always_capture_default(false);
  app.add_option("--part", options.part,
                 "which images to score: all, or those that the training used for training or for validation")
      ->check(CLI::IsMember({"all", "training", "validation"}));
}

std::vector<Sample> choose_samples(const Options& options) {
  auto samples = list_samples(options.data);
  if (options.part == "all") return samples;
  auto flags = read_saved(options.model)["options"].get<Identity>();
  const auto parts = split(samples, std::stod(flags["--validation"]), std::stoull(flags["--seed"]));
  if (flags["images"] == absl::StrCat(parts.training.size())) {
    return options.part == "training" ? parts.training : parts.validation;
  }
  throw std::runtime_error(options.data.string() + " is not the data of " + options.model.string() +
                           ", which was trained on " + flags["images"] + " images; give --part all");
}

int evaluate(const Options& options) {
  const auto samples = choose_samples(options);
  std::vector<std::filesystem::path> images;
  for (const auto& sample : samples) images.push_back(sample.image);
  std::vector<torch::Tensor> pairs;  // of each image
  predict_images(options, images, [&](std::size_t number, const torch::Tensor& probabilities) {
    const auto classes = static_cast<int>(probabilities.size(1));
    const auto truth = read_labels(samples[number].mask, classes);
    pairs.push_back(count_pairs(to_labels(probabilities)[0][0], truth, classes));
  });
  const auto classes = static_cast<int>(pairs.at(0).size(0));

  std::string csv = "image,dice,iou";
  for (int k = 1; classes > 2 && k < classes; ++k) absl::StrAppend(&csv, ",dice_", k, ",iou_", k);
  csv += "\n";
  // With two classes, the mean over the classes is the only class.
  const auto add_row = [&](const std::string& name, const std::vector<Score>& scores) {
    csv += name;
    for (std::size_t k = 0; k < (classes == 2 ? 1 : scores.size()); ++k) {
      absl::StrAppendFormat(&csv, ",%.6f,%.6f", scores[k].dice, scores[k].iou);
    }
    csv += "\n";
    std::cout << absl::StrFormat("%-24s dice %.4f, IoU %.4f\n", name, scores[0].dice, scores[0].iou);
  };
  std::vector<Score> means(static_cast<std::size_t>(classes));
  for (std::size_t i = 0; i < images.size(); ++i) {
    const auto scores = to_scores(pairs[i]);
    for (std::size_t k = 0; k < scores.size(); ++k) {
      means[k].dice += scores[k].dice / static_cast<double>(images.size());
      means[k].iou += scores[k].iou / static_cast<double>(images.size());
    }
    add_row(images[i].stem().string(), scores);
  }
  add_row("(mean of images)", means);
  add_row("(all pixels)", to_scores(torch::stack(pairs).sum(0)));
  const auto file = options.output / "scores.csv";
  write_file(file, csv);
  std::cout << "wrote " << file.string() << std::endl;
  return 0;
}

}  // namespace
}  // namespace gpipe::examples::unet

int main(int argc, char** argv) {
  CLI::App app("Scores a trained U-Net on images with masks: Dice and IoU of each and of all.");
  gpipe::examples::unet::Options options;
  gpipe::examples::unet::add_options(app, options);
  return gpipe::examples::run_program(app, argc, argv, [&] { return gpipe::examples::unet::evaluate(options); });
}
