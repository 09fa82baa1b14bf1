#include "examples/gpipe_balance/model.h"

#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>

#include "absl/strings/str_format.h"
#include "balance/profiler.h"
#include "examples/common/image.h"
#include "examples/common/percent.h"
#include "models/resnet.h"
#include "models/unet.h"

namespace gpipe::examples::balance {
namespace {

const std::map<std::string, torch::nn::Sequential (*)(const models::ResNetOptions&)> kResNets = {
    {"resnet18", models::resnet18},   {"resnet34", models::resnet34},   {"resnet50", models::resnet50},
    {"resnet101", models::resnet101}, {"resnet152", models::resnet152},
};

void check_matches(const Profile& profile, const Options& options, int chunks) {
  if (const auto samples = options.sizes(chunks).front(); profile.samples != samples) {
    throw std::invalid_argument(
        absl::StrFormat("%s was measured with micro-batches of %d, but --batch-size and --chunks make micro-batches of "
                        "%d; change these, or measure again",
                        options.profile, profile.samples, samples));
  }
  const auto children = make_model(options)->named_children();
  const bool same = std::equal(profile.layers.begin(), profile.layers.end(), children.begin(), children.end(),
                               [](const auto& layer, const auto& child) { return layer.name == child.key(); });
  if (same) return;
  throw std::invalid_argument(
      absl::StrFormat("%s is not a profile of %s, whose layers have other names; give the --model that was measured",
                      options.profile, options.model));
}

}  // namespace

std::string read_text(const std::string& path, std::size_t most) {
  std::ifstream file(path, std::ios::binary);
  std::string text(most + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.eof() && file.fail()) throw std::runtime_error("cannot read " + path);
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > most) {
    throw std::invalid_argument(absl::StrFormat("%s has more than %d bytes, which is the limit", path, most));
  }
  return text;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names = {"unet"};
  for (const auto& [name, make] : kResNets) names.push_back(name);
  return names;
}

torch::nn::Sequential make_model(const Options& options) {
  auto model = options.model == "unet" ? models::unet(models::UNetOptions().base_channels(options.channels))
                                       : kResNets.at(options.model)({});
  if (options.stages > static_cast<int>(model->size())) {
    throw std::invalid_argument(
        absl::StrFormat("--stages is %d, but %s has %d layers", options.stages, options.model, model->size()));
  }
  return model;
}

torch::Tensor make_batch(const Options& options) {
  const auto size = to_size(options.size);
  return torch::randn({options.batch_size, 3, size.height, size.width}, options.place().front());
}

Profile profile_of(const Options& options, int chunks) {
  if (!options.profile.empty()) {
    auto profile = profile_from_json(read_text(options.profile, kMaxProfileJson));
    check_matches(profile, options, chunks);
    return profile;
  }
  const auto batch = make_batch(options);
  const auto samples = options.sizes(chunks).front();
  Percent percent(std::cerr, isatty(STDERR_FILENO) != 0, "measuring " + options.model);
  return profile(make_model(options), batch.narrow(0, 0, samples),
                 options.profiling().progress([&](double part) { percent.show(part); }));
}

}  // namespace gpipe::examples::balance
