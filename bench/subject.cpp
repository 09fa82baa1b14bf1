#include "bench/subject.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <stdexcept>

#include "gpipe/nested.h"
#include "models/resnet.h"
#include "models/unet.h"

namespace gpipe::bench {

namespace nn = torch::nn;

const std::vector<std::string> kSubjects = {"mlp", "unet", "resnet50"};

Subject subject(const std::string& name, int chunks) {
  torch::manual_seed(0);
  if (name == "mlp") {
    nn::Sequential model;
    for (int i = 0; i < 16; ++i) {
      model->push_back(NestedSequential({{"linear", nn::Linear(1024, 1024)}, {"relu", nn::ReLU()}}));
    }
    return {name, model, torch::randn({1024, 1024}), 1024 / chunks};
  }
  if (name == "unet") {
    auto model = models::unet(models::UNetOptions().base_channels(16));
    return {name, model, torch::randn({16, 3, 96, 96}), 16 / chunks};
  }
  if (name == "resnet50") {
    return {name, models::resnet50(), torch::randn({16 * chunks, 3, 64, 64}), 16};
  }
  throw std::invalid_argument("no model is called '" + name + "'; there are mlp, unet and resnet50");
}

}  // namespace gpipe::bench
