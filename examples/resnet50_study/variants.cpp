#include "examples/resnet50_study/variants.h"

#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <exception>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "balance/balance.h"
#include "balance/predict.h"
#include "gpipe/gpipe.h"
#include "gpipe/runtime/intraop.h"
#include "models/resnet.h"

namespace gpipe::examples::study {
namespace {

constexpr double kLearningRate = 0.001;
constexpr double kSeconds = 10;  // that a profile may take

using Step = std::function<void(const torch::Tensor&, const torch::Tensor&)>;

void copy_weights(const torch::nn::Module& from, const torch::nn::Module& to) {
  const torch::NoGradGuard no_grad;
  const auto sources = from.named_parameters();
  for (auto& parameter : to.named_parameters()) parameter.value().copy_(sources[parameter.key()]);
}

torch::nn::Sequential model_like(const torch::nn::Sequential& original) {
  auto model = models::resnet50();
  copy_weights(*original, *model);
  return model;
}

/// Forward, loss and backward, as anybody would write them.
template <typename Model>
void forward_backward(Model& model, const torch::Tensor& input, const torch::Tensor& target) {
  const auto output = model->forward(input);
  torch::mse_loss(output, target.to(output.device())).backward();
}

template <typename Model>
Step train(Model model) {
  auto optimizer = std::make_shared<torch::optim::SGD>(model->parameters(), kLearningRate);
  return [model, optimizer](const torch::Tensor& input, const torch::Tensor& target) mutable {
    optimizer->zero_grad();
    forward_backward(model, input, target);
    optimizer->step();
  };
}

/// Each device trains a replica on its half of the mini-batch, in a thread of its own; gradients are averaged.
class Replicas {
 public:
  Replicas(const torch::nn::Sequential& original, const std::vector<torch::Device>& devices) : devices_(devices) {
    for (const auto& device : devices) {
      auto& model = models_.emplace_back(model_like(original));
      model->to(device);
      optimizers_.push_back(std::make_unique<torch::optim::SGD>(model->parameters(), kLearningRate));
    }
  }

  void step(const torch::Tensor& input, const torch::Tensor& target) {
    const auto count = static_cast<std::int64_t>(devices_.size());
    const auto inputs = input.chunk(count);
    const auto targets = target.chunk(count);
    const int threads = std::max<int>(1, torch::get_num_threads());
    std::vector<std::exception_ptr> errors(devices_.size());
    std::vector<std::jthread> workers;
    for (std::size_t r = 0; r < devices_.size(); ++r) {
      workers.emplace_back([&, r] {
        try {
          set_intraop_threads_of_this_thread(threads);
          optimizers_[r]->zero_grad();
          forward_backward(models_[r], inputs[r].to(devices_[r]), targets[r].to(devices_[r]));
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    }
    workers.clear();  // joins
    for (const auto& error : errors) {
      if (error) std::rethrow_exception(error);
    }
    average_gradients();
    for (const auto& optimizer : optimizers_) optimizer->step();
  }

 private:
  void average_gradients() {
    std::vector<std::vector<torch::Tensor>> parameters;
    for (const auto& model : models_) parameters.push_back(model->parameters());
    for (std::size_t i = 0; i < parameters.front().size(); ++i) {
      auto& mean = parameters.front()[i].mutable_grad();
      for (std::size_t r = 1; r < parameters.size(); ++r) mean.add_(parameters[r][i].grad().to(mean.device()));
      mean.div_(static_cast<double>(parameters.size()));
      for (std::size_t r = 1; r < parameters.size(); ++r) parameters[r][i].mutable_grad().copy_(mean);
    }
  }

  const std::vector<torch::Device> devices_;
  std::vector<torch::nn::Sequential> models_;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers_;
};

Profile measure(const torch::nn::Sequential& model, const Experiment& experiment, std::int64_t samples, bool both) {
  const auto device = experiment.devices.front();
  return profile(model, torch::randn({samples, 3, experiment.image, experiment.image}, device),
                 ProfileOptions().workers(both && device.is_cpu() ? 2 : 1).seconds(kSeconds).repeats(3));
}

}  // namespace

std::vector<Variant> make_variants(const Experiment& experiment, const std::function<void(const std::string&)>& tell) {
  const auto original = models::resnet50();
  const auto layers = static_cast<std::int64_t>(original->size());
  const auto whole = experiment.batch_size;
  std::vector<Variant> variants;
  tell(absl::StrCat(whole, " samples, one device at work"));
  const auto alone = measure(original, experiment, whole, false);
  const RunOptions unsplit{.chunks = 1, .checkpoint = Checkpoint::kNever};
  auto single = model_like(original);
  single->to(experiment.devices.front());
  variants.push_back({"single", 0, predict(alone, {layers}, unsplit).seconds, train(single)});

  const auto pipeline = [&](const std::vector<std::int64_t>& balance, std::int64_t split) {
    return train(GPipe(model_like(original), balance,
                       GPipeOptions()
                           .devices(experiment.devices)
                           .split_size(split)
                           .checkpoint(Checkpoint::kNever)
                           .intraop_threads(torch::get_num_threads())));
  };
  const auto halves = balance_by_time(alone, 2, unsplit);
  variants.push_back({"model parallel", 0, predict(alone, halves, unsplit).seconds, pipeline(halves, whole)});
  for (const auto split : experiment.splits) {
    tell(absl::StrCat(split, " samples, both devices at work"));
    const auto of_split = measure(original, experiment, split, true);
    const RunOptions run{.chunks = static_cast<int>((whole + split - 1) / split), .checkpoint = Checkpoint::kNever};
    const auto balance = balance_by_time(of_split, 2, run);
    variants.push_back({"pipeline", split, predict(of_split, balance, run).seconds, pipeline(balance, split)});
  }
  tell(absl::StrCat(whole / 2, " samples, both devices at work"));
  const auto half = measure(original, experiment, whole / 2, true);
  auto replicas = std::make_shared<Replicas>(original, experiment.devices);
  variants.push_back(
      {"data parallel", 0, predict(half, {layers}, unsplit).seconds,
       [replicas](const torch::Tensor& input, const torch::Tensor& target) { replicas->step(input, target); }});
  return variants;
}

}  // namespace gpipe::examples::study
