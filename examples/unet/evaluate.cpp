// Scores a trained U-Net on images with masks, as a pipeline.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/common/files.h"
#include "examples/common/flags.h"
#include "examples/common/progress.h"
#include "examples/unet/carvana.h"
#include "examples/unet/classes.h"
#include "examples/unet/metrics.h"
#include "examples/unet/predictor.h"
#include "examples/unet/segmentation.h"
#include "gpipe/snapshot.h"

namespace gpipe::examples::unet {
namespace {

struct Options : PredictorOptions {
  std::filesystem::path data;
  std::string part = "all";
  std::filesystem::path output = "out/evaluate";
};

void add_options(CLI::App& app, Options& options) {
  add_predictor_options(app, options);
  app.add_option("--data", options.data, "folder with imgs/NAME.jpg|png and masks/NAME_mask.gif|png")
      ->required()
      ->always_capture_default(false);
  app.add_option("--part", options.part,
                 "which images to score: all, or those that the training used for training or for validation")
      ->check(CLI::IsMember({"all", "training", "validation"}));
  app.add_option("-o,--output", options.output, "folder for scores.csv")->transform(path_name());
}

std::vector<Sample> choose_samples(const Options& options) {
  auto samples = list_samples(options.data);
  if (options.part == "all") return samples;
  auto flags = read_snapshot(options.model).options;
  const auto seed = to_whole_number(flags["--seed"]);
  const auto percent = to_number(flags["--validation"]);
  if (!seed || !percent) {
    throw std::runtime_error(options.model.string() + " does not store --seed and --validation, which --part needs");
  }
  auto parts = split(samples, *percent, *seed);
  if (flags["images"] != absl::StrCat(parts.training.size())) {
    throw std::runtime_error(options.data.string() + " is not the data of " + options.model.string() +
                             ", which was trained on " + flags["images"] + " images, not " +
                             absl::StrCat(parts.training.size()) + "; give --part all");
  }
  return options.part == "training" ? parts.training : parts.validation;
}

// The numbers of a row: Dice and IoU, then those of each class if there are several.
std::vector<double> row_of(const std::vector<Score>& classes) {
  const Score all = mean(classes);
  std::vector<double> row = {all.dice, all.iou};
  for (const auto& score : classes) {
    if (classes.size() > 1) row.insert(row.end(), {score.dice, score.iou});
  }
  return row;
}

class Table {
 public:
  Table(std::size_t name_width, int classes) : name_width_(name_width) {
    std::vector<std::string> names = {"dice", "iou"};
    for (int k = 1; k < classes && classes > 2; ++k) {
      names.insert(names.end(), {absl::StrCat("dice_", k), absl::StrCat("iou_", k)});
    }
    text_ = absl::StrFormat("%-*s", static_cast<int>(name_width_), "image");
    csv_ = "image";
    for (const auto& name : names) {
      absl::StrAppendFormat(&text_, "  %7s", name);
      absl::StrAppend(&csv_, ",", name);
    }
    end_row();
  }

  void add(const std::string& name, const std::vector<double>& values) {
    absl::StrAppendFormat(&text_, "%-*s", static_cast<int>(name_width_), name);
    csv_ += name.find_first_of(",\"\n") == std::string::npos ? name : quoted(name);
    for (const double value : values) {
      absl::StrAppendFormat(&text_, "  %7.4f", value);
      absl::StrAppendFormat(&csv_, ",%.6f", value);
    }
    end_row();
  }

  const std::string& text() const { return text_; }
  const std::string& csv() const { return csv_; }

 private:
  static std::string quoted(const std::string& name) {
    std::string result = "\"";
    for (const char c : name) result += c == '"' ? std::string("\"\"") : std::string(1, c);
    return result + "\"";
  }
  void end_row() {
    text_ += '\n';
    csv_ += '\n';
  }

  const std::size_t name_width_;
  std::string text_;
  std::string csv_;
};

int evaluate(const Options& options) {
  const auto samples = choose_samples(options);
  check_writable_directory(options.output);
  std::vector<std::filesystem::path> images;
  std::size_t name_width = 16;
  for (const auto& sample : samples) {
    images.push_back(sample.image);
    name_width = std::max(name_width, sample.image.stem().string().size());
  }
  Predictor predictor(options, images);
  const int classes = predictor.classes();
  print_stages(std::cout, "U-Net", *predictor.pipe(), predictor.pipe());

  Table table(name_width, classes);
  Metrics all(classes);
  {
    Progress progress(std::cout, isatty(STDOUT_FILENO) != 0, "evaluate", static_cast<int64_t>(images.size()));
    predictor.run([&](std::size_t number, const torch::Tensor& probabilities) {
      auto mask = read_labels(samples[number].mask, classes);
      const auto truth = torch::from_blob(mask.pixels.data(), {1, 1, mask.height, mask.width}, torch::kByte);
      const auto labels = to_labels(probabilities);
      all.add(labels, truth);
      Metrics one(classes);
      one.add(labels, truth);
      table.add(images[number].stem().string(), row_of(one.scores().images));
      progress.add(1);
    });
  }
  const auto scores = all.scores();
  table.add("(mean of images)", row_of(scores.images));
  table.add("(all pixels)", row_of(scores.pixels));
  const auto file = options.output / "scores.csv";
  write_file(file, table.csv());
  std::cout << table.text() << "wrote " << file.string() << std::endl;
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
