#include "bench/resnet50_study/variants.h"

#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "balance/balance.h"
#include "balance/predict.h"
#include "balance/trial.h"
#include "gpipe/gpipe.h"
#include "gpipe/options.h"
#include "gpipe/snapshot.h"
#include "models/resnet.h"

namespace gpipe::study {
namespace {

constexpr double kLearningRate = 0.001;

// This replica's part of a mini-batch.
std::pair<std::int64_t, std::int64_t> part_of(const std::shared_ptr<Ranks>& ranks, std::int64_t images) {
  return ranks ? ranks->part(images) : std::pair<std::int64_t, std::int64_t>(0, images);
}

using Step = std::function<void(const torch::Tensor&, const torch::Tensor&)>;

torch::nn::Sequential model_like(const torch::nn::Sequential& original) {
  auto model = models::resnet50();
  restore_model(*model, capture_model(*original));
  return model;
}

/// The usual training code: forward, loss and backward.
template <typename Model>
void forward_backward(Model& model, const torch::Tensor& input, const torch::Tensor& target) {
  const auto output = model->forward(input);
  torch::mse_loss(output, target.to(output.device())).backward();
}

/// Trains on the part of a mini-batch that belongs to this process's replica.
template <typename Model>
Step train(Model model, const std::shared_ptr<Ranks>& ranks = nullptr) {
  auto optimizer = std::make_shared<torch::optim::SGD>(model->parameters(), kLearningRate);
  return [model, optimizer, ranks](const torch::Tensor& input, const torch::Tensor& target) mutable {
    const auto [begin, end] = part_of(ranks, input.size(0));
    optimizer->zero_grad();
    forward_backward(model, input.slice(0, begin, end), target.slice(0, begin, end));
    optimizer->step();
  };
}

/// Data parallelism: each of two devices trains a replica on its half of the mini-batch, in its own thread. Averages
/// gradients.
Step train_replicas(const torch::nn::Sequential& original, const std::vector<torch::Device>& devices) {
  std::vector<torch::nn::Sequential> models;
  std::vector<std::shared_ptr<torch::optim::SGD>> optimizers;
  for (const auto& device : devices) {
    auto& model = models.emplace_back(model_like(original));
    model->to(device);
    optimizers.push_back(std::make_shared<torch::optim::SGD>(model->parameters(), kLearningRate));
  }
  return [=](const torch::Tensor& input, const torch::Tensor& target) mutable {
    const auto inputs = input.chunk(2);
    const auto targets = target.chunk(2);
    std::vector<std::future<void>> workers;
    for (std::size_t r = 0; r < 2; ++r) {
      workers.push_back(std::async(std::launch::async, [&, r, threads = torch::get_num_threads()] {
        set_intraop_threads_of_this_thread(threads);
        optimizers[r]->zero_grad();
        forward_backward(models[r], inputs[r].to(devices[r]), targets[r].to(devices[r]));
      }));
    }
    for (auto& worker : workers) worker.get();
    const auto first = models[0]->parameters();
    const auto second = models[1]->parameters();
    for (std::size_t i = 0; i < first.size(); ++i) {
      auto& mean = first[i].mutable_grad();
      mean.add_(second[i].grad().to(mean.device())).div_(2);
      second[i].mutable_grad().copy_(mean);
    }
    for (const auto& optimizer : optimizers) optimizer->step();
  };
}

/// Describes a variant: `at_work` devices work at the same time, on `samples` samples each.
struct Way {
  std::string name;
  std::int64_t split;
  std::int64_t samples;
  int stages;
  int at_work;
  std::shared_ptr<Ranks> ranks = nullptr;  // null: one process
  std::vector<std::int64_t> balance = {};
  std::vector<double> predicted = {};
};

/// The ways that this process takes part in.
std::vector<Way> ways_of(const Experiment& experiment) {
  const auto whole = experiment.batch_size;
  const auto& processes = experiment.processes;
  std::vector<Way> ways;
  if (is_first(processes.all)) {
    ways = {{"single", 0, whole, 1, 1}, {"model parallel", 0, whole, 2, 1}};
    for (const auto split : experiment.splits) ways.push_back({"pipeline", split, split, 2, 2});
    ways.push_back({"data parallel", 0, whole / 2, 1, 2});
  }
  if (processes.two) ways.push_back({"data parallel over processes", 0, whole / 2, 1, 2, processes.two});
  for (const auto split : experiment.splits) {
    if (processes.four && split <= whole / 2) ways.push_back({"data × pipeline", split, split, 2, 4, processes.four});
  }
  return ways;
}

/// Sets balances and predictions. Profiles each way several times, in turn, because the machine's speed changes.
void plan(std::vector<Way>& ways, const torch::nn::Sequential& model, const Experiment& experiment,
          const std::function<void(const std::string&)>& tell) {
  const auto device = experiment.devices.front();
  for (int round = 0; round < experiment.predictions; ++round) {
    std::map<std::pair<std::int64_t, int>, Profile> profiles;  // by samples and devices at work
    for (auto& way : ways) {
      auto& of_way = profiles[{way.samples, way.at_work}];
      if (of_way.layers.empty()) {
        tell(absl::StrFormat("%d samples, %d devices at work", way.samples, way.at_work));
        of_way = profile(model, torch::randn({way.samples, 3, experiment.image, experiment.image}, device),
                         ProfileOptions()
                             .workers(device.is_cpu() ? way.at_work : 1)
                             .intraop_threads(torch::get_num_threads())
                             .seconds(experiment.profile_seconds)
                             .repeats(3));
      }
      const auto [begin, end] = part_of(way.ranks, experiment.batch_size);
      const auto chunks = way.split > 0 ? (end - begin + way.split - 1) / way.split : 1;
      const RunOptions run{.chunks = static_cast<int>(chunks), .checkpoint = Checkpoint::kNever};
      if (way.balance.empty()) way.balance = balance_by_time(of_way, way.stages, run);
      way.predicted.push_back(predict(of_way, way.balance, run).seconds);
    }
  }
}

/// Gives all processes of a way the first one's balance.
void share_balance(Way& way) {
  if (!way.ranks) return;
  std::istringstream text(way.ranks->share(absl::StrJoin(way.balance, " ")));
  way.balance.assign(std::istream_iterator<std::int64_t>(text), {});
}

Step step_of(const Way& way, const torch::nn::Sequential& original, const Experiment& experiment) {
  const auto& devices = experiment.devices;
  if (way.ranks || way.stages > 1) {
    auto options =
        GPipeOptions().split_size(way.samples).checkpoint(Checkpoint::kNever).intraop_threads(torch::get_num_threads());
    if (way.ranks) {
      options.ranks(way.ranks).devices({devices[way.ranks->rank() % devices.size()]});
    } else {
      options.devices(devices);
    }
    return train(GPipe(model_like(original), way.balance, options), way.ranks);
  }
  if (way.at_work == 1) {
    auto model = model_like(original);
    model->to(devices.front());
    return train(model);
  }
  return train_replicas(original, devices);
}

}  // namespace

std::vector<Variant> make_variants(const Experiment& experiment, const std::function<void(const std::string&)>& tell) {
  const auto original = models::resnet50();
  auto ways = ways_of(experiment);
  if (is_first(experiment.processes.all)) plan(ways, original, experiment, tell);
  for (auto& way : ways) share_balance(way);
  std::vector<Variant> variants;
  for (const auto& way : ways) {
    const auto predicted = way.predicted.empty() ? 0 : median(way.predicted);
    variants.push_back({way.name, way.split, predicted, step_of(way, original, experiment)});
  }
  return variants;
}

}  // namespace gpipe::study
