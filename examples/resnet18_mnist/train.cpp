// Trains a ResNet-18 on MNIST's files, as a pipeline.

#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <ATen/CPUGeneratorImpl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/processes.h"
#include "examples/common/random.h"
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

Example to_example(const LabelledImages& set) {
  return {set.images.unsqueeze(1).to(torch::kFloat).div_(255), set.labels.to(torch::kLong)};
}

/// Learns to classify images [n, 1, h, w] with values 0 to 1 into logits [n, classes].
class ClassificationTask : public Task {
 public:
  ClassificationTask(Example training, Example test, std::int64_t batch_size, std::uint64_t seed,
                     std::shared_ptr<Ranks> ranks)
      : training_(std::move(training)),
        test_(std::move(test)),
        batch_size_(batch_size),
        seed_(seed),
        ranks_(std::move(ranks)) {}

  std::int64_t training_images() const override { return training_.input.size(0); }
  std::vector<std::int64_t> image_shape() const override { return training_.input[0].sizes().vec(); }

  Examples training(int epoch, std::int64_t first) override {
    const auto generator = at::detail::createCPUGenerator(Random(seed_, static_cast<std::uint64_t>(epoch)).seed());
    return [this, order = torch::randperm(training_images(), generator),
            next = first * batch_size_]() mutable -> std::optional<Example> {
      const auto count = std::min(batch_size_, order.size(0) - next);
      if (count <= 0) return std::nullopt;
      const auto [begin, end] = part_of(ranks_, count);
      const auto chosen = order.slice(0, next + begin, next + end);
      next += count;
      return Example{training_.input.index_select(0, chosen), training_.target.index_select(0, chosen)};
    };
  }

  torch::Tensor loss(const torch::Tensor& logits, const torch::Tensor& labels) const override {
    return torch::nn::functional::cross_entropy(logits.to(torch::kFloat), labels);
  }

  std::vector<double> validate(GPipe& pipe, const std::filesystem::path& /*picture*/) override {
    const auto count = test_.input.size(0);
    double right = 0, loss_sum = 0;
    for (std::int64_t start = 0; start < count; start += batch_size_) {
      const auto [begin, end] = part_of(ranks_, std::min(batch_size_, count - start));
      const auto labels = test_.target.slice(0, start + begin, start + end);
      const auto logits = pipe->forward(test_.input.slice(0, start + begin, start + end)).cpu();
      if (begin == end) continue;  // the mean of no losses is not a number
      loss_sum += loss(logits, labels).item<double>() * static_cast<double>(end - begin);
      right += (logits.argmax(1) == labels).sum().item<double>();
    }
    auto scores = pipe->team().sum_over_replicas({right, loss_sum});
    for (auto& score : scores) score /= static_cast<double>(count);
    return scores;
  }

 private:
  const Example training_;
  const Example test_;
  const std::int64_t batch_size_;
  const std::uint64_t seed_;
  const std::shared_ptr<Ranks> ranks_;
};

int train(const Options& options) {
  Program program{.identity = {{"--small-images", absl::StrCat(options.small_images)}},
                  .scores = {"accuracy", "test_loss"}};
  program.make_model = [&] {
    return models::resnet18(
        models::ResNetOptions().num_classes(kClasses).in_channels(1).small_images(options.small_images));
  };
  program.load = [&](const std::shared_ptr<Ranks>& ranks) {
    const auto training = to_example(read_idx(options.data, "train"));
    const auto test = to_example(read_idx(options.data, "t10k"));
    std::cout << "data: " << training.input.size(0) << " images to train, " << test.input.size(0) << " to test\n";
    return std::make_unique<ClassificationTask>(training, test, options.batch_size, options.seed, ranks);
  };
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
