// compare MODEL STATE SAMPLE: loads torchvision's state from the file STATE into the model, and compares its output for
// x with y, both from the file SAMPLE. Exit status: 0 if they agree to 1e-5.
#include <ATen/core/grad_mode.h>
#include <torch/serialize.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "models/resnet.h"

int main(int argc, char** argv) {
  using namespace gpipe::models;
  const std::vector<std::string> arguments(argv, argv + argc);
  const std::map<std::string, torch::nn::Sequential (*)(const ResNetOptions&)> models{{"resnet18", resnet18},
                                                                                      {"resnet50", resnet50}};
  auto model = models.at(arguments.at(1))({});
  load_torchvision(*model, std::filesystem::path(arguments.at(2)));
  model->eval();
  std::ifstream file(arguments.at(3), std::ios::binary);
  const auto sample = torch::pickle_load({std::istreambuf_iterator<char>(file), {}}).toGenericDict();
  const at::NoGradGuard no_grad;
  const auto y = model->forward(sample.at("x").toTensor());
  const auto difference = (y - sample.at("y").toTensor()).abs().max().item<double>();
  std::cout << "largest difference: " << difference << '\n';
  return difference <= 1e-5 ? 0 : 1;
}
