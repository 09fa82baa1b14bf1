// Trains a ResNet-18 on MNIST's files, as a pipeline.

#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/trainer.h"
#include "examples/resnet18_mnist/digits.h"
#include "models/resnet.h"

namespace gpipe::examples::mnist {
namespace {

constexpr std::int64_t kClasses = 10;

struct Options : TrainingOptions {
  std::string data;
  bool small_images = false;
};

void add_options(CLI::App& app, Options& options) {
  options.output = "out/resnet18_mnist";
  options.epochs = 5;
  options.batch_size = 64;
  options.chunks = 4;
  options.learning_rate = 2e-3;
  add_training_options(app, options);
  app.add_option("--data", options.data, "folder with MNIST's four IDX files, uncompressed")
      ->required()
      ->always_capture_default(false);
  app.add_flag("--small-images", options.small_images,
               "begin with a 3x3 convolution and without pooling: more accurate, 15 times the work");
}

Example read_part(const std::string& folder, const std::string& part) {
  const auto set = read_idx(folder, part);
  return {set.images.unsqueeze(1).to(torch::kFloat).div_(255), set.labels.to(torch::kLong)};
}

/// Learns to classify images [n, 1, h, w] with values 0 to 1 into logits [n, classes].
class ClassificationTask : public Task {
 public:
  explicit ClassificationTask(const Options& options)
      : training_(read_part(options.data, "train")), test_(read_part(options.data, "t10k")) {
    std::cout << "data: " << training_images() << " images to train, " << test_.input.size(0) << " to test\n";
  }

  std::int64_t training_images() const override { return training_.input.size(0); }
  std::int64_t validation_images() const override { return test_.input.size(0); }

  Example read(const torch::Tensor& numbers, int epoch) const override {
    const auto& all = epoch > 0 ? training_ : test_;
    return {all.input.index_select(0, numbers), all.target.index_select(0, numbers)};
  }

  torch::Tensor loss(const torch::Tensor& logits, const torch::Tensor& labels) const override {
    return torch::nn::functional::cross_entropy(logits.to(torch::kFloat), labels);
  }

  void add(const Example& example, const torch::Tensor& logits, const std::filesystem::path& /*picture*/) override {
    right_ += (logits.argmax(1) == example.target).sum().item<double>();
  }
  std::vector<double> take_scores() override {
    return {std::exchange(right_, 0) / static_cast<double>(validation_images())};
  }

 private:
  const Example training_;
  const Example test_;
  double right_ = 0;
};

int train(const Options& options) {
  Program program{.identity = {{"--small-images", absl::StrCat(options.small_images)}}, .scores = {"accuracy"}};
  program.make_model = [&] {
    return models::resnet18(
        models::ResNetOptions().num_classes(kClasses).in_channels(1).small_images(options.small_images));
  };
  program.load = [&] { return std::make_unique<ClassificationTask>(options); };
  return run_training(options, program);
}

}  // namespace
}  // namespace gpipe::examples::mnist

int main(int argc, char** argv) {
  CLI::App app("Trains a ResNet-18 to read digits, as a pipeline over several devices.");
  gpipe::examples::mnist::Options options;
  gpipe::examples::mnist::add_options(app, options);
  return gpipe::examples::run_program(app, argc, argv, [&] { return gpipe::examples::mnist::train(options); });
}
