#include "examples/unet/predictor.h"

#include <torch/nn/functional/upsampling.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <stdexcept>

#include "examples/common/plan.h"
#include "examples/common/resume.h"
#include "examples/unet/data.h"
#include "examples/unet/segmentation.h"
#include "gpipe/snapshot.h"

namespace gpipe::examples::unet {

void add_predictor_options(CLI::App& app, PredictorOptions& options, const std::string& output) {
  options.batch_size = 4;
  options.stages = 1;  // measuring takes longer than predicting a few images
  add_pipeline_options(app, options);
  app.add_option("-m,--model", options.model, "snapshot of a training")->required()->always_capture_default(false);
  app.add_option("-s,--scale", options.scale,
                 "size of the network's input, relative to the files; by default as in training")
      ->check(in_range(0.001, 1));
  app.add_option("-o,--output", options.output, output);
}

void predict_images(const PredictorOptions& options, const std::vector<std::filesystem::path>& images,
                    const UsePrediction& use) {
  namespace F = torch::nn::functional;
  const auto flags = read_saved(options.model)["options"].get<Identity>();
  std::vector<Size> sizes;
  for (const auto& image : images) sizes.push_back(image_size(image));
  ModelOptions model_options;
  double scale = 1;
  try {
    model_options = from_flags(flags);
    scale = options.scale.value_or(std::stod(flags.at("--scale")));
  } catch (const std::logic_error& error) {
    throw std::runtime_error(options.model.string() + " is not a snapshot of unet_train: " + error.what());
  }
  auto model = make_model(model_options);
  load_snapshot(options.model, *model);
  model->eval();
  const Size first_size = scaled(sizes.at(0), scale);
  auto fitting = options;
  fitting.batch_size = std::min(fitting.batch_size, static_cast<std::int64_t>(images.size()));
  auto pipe = plan_inference(model, fitting, {3, first_size.height, first_size.width});
  pipe->eval();
  std::filesystem::create_directories(options.output);

  const torch::NoGradGuard no_grad;
  for (std::size_t begin = 0, end = 0; begin < images.size(); begin = end) {
    // Consecutive images of the same size share batches.
    const Size size = scaled(sizes[begin], scale);
    std::vector<Sample> samples;
    for (; end < images.size() && scaled(sizes[end], scale) == size; ++end) samples.push_back({images[end]});
    const auto batches = load(samples, size, {.batch_size = options.batch_size});
    for (std::size_t image = begin; const auto batch = batches();) {
      const auto probabilities = to_probabilities(pipe->forward(batch->input)).cpu();
      for (std::int64_t i = 0; i < probabilities.size(0); ++i, ++image) {
        const std::vector<std::int64_t> whole = {sizes[image].height, sizes[image].width};
        use(image, F::interpolate(probabilities.narrow(0, i, 1),
                                  F::InterpolateFuncOptions().size(whole).mode(torch::kBilinear).align_corners(false)));
      }
    }
  }
}

}  // namespace gpipe::examples::unet
