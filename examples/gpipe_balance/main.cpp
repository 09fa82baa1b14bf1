// gpipe-balance: what the layers of a model cost, how to cut it, and what that is predicted to cost.

#include <torch/utils.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "absl/strings/str_format.h"
#include "balance/cut.h"
#include "balance/predict.h"
#include "balance/profiler.h"
#include "balance/report.h"
#include "balance/suggest.h"
#include "examples/common/files.h"
#include "examples/common/flags.h"
#include "examples/common/image.h"
#include "examples/common/percent.h"
#include "examples/common/pipeline_options.h"
#include "examples/common/plan.h"
#include "gpipe/micro_batch.h"
#include "gpipe/runtime/memory_reuse.h"
#include "models/resnet.h"
#include "models/unet.h"

namespace gpipe::examples::balance {
namespace {

using Json = nlohmann::ordered_json;

const std::map<std::string, torch::nn::Sequential (*)(const models::ResNetOptions&)> kResNets = {
    {"resnet18", models::resnet18},   {"resnet34", models::resnet34},   {"resnet50", models::resnet50},
    {"resnet101", models::resnet101}, {"resnet152", models::resnet152},
};

struct Options {
  std::string model = "unet";
  std::string size = "96x96";
  std::int64_t channels = 64;
  std::int64_t batch_size = 16;
  int chunks = 4;
  std::vector<int> tried;  // numbers of chunks; empty: all powers of two
  int stages = 2;
  std::string devices;  // empty: the GPUs in turn, or the CPU
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  std::string by = "time";
  double bandwidth = 0;     // GB/s
  std::int64_t memory = 0;  // bytes
  double seconds = 10;
  double param_scale = 4;
  int refine = 0;
  int near = 4;
  std::string profile;
  std::string output;
  bool json = false;

  /// Images of each micro-batch.
  std::vector<std::int64_t> sizes(int wanted) const { return micro_batch_sizes(batch_size, wanted, 0); }
  std::vector<torch::Device> place() const {
    return devices.empty() ? examples::place({.stages = stages}) : to_devices(devices, stages);
  }
  RunOptions run(int wanted, Checkpoint mode) const {
    return {static_cast<int>(sizes(wanted).size()), mode, bandwidth * 1e9, copies_between(place())};
  }
  ProfileOptions profiling() const { return profile_options(place()).seconds(seconds).param_scale(param_scale); }
};

torch::nn::Sequential make_model(const Options& options) {
  auto model = options.model == "unet" ? models::unet(models::UNetOptions().base_channels(options.channels))
                                       : kResNets.at(options.model)({});
  if (options.stages > static_cast<int>(model->size())) {
    throw std::invalid_argument("--stages is " + std::to_string(options.stages) + ", but " + options.model + " has " +
                                std::to_string(model->size()) + " layers");
  }
  return model;
}

/// That a profile is of the model that the options name.
void check_names(const Options& options, const Profile& profile) {
  const auto children = make_model(options)->named_children();
  const bool same = std::equal(profile.layers.begin(), profile.layers.end(), children.begin(), children.end(),
                               [](const auto& layer, const auto& child) { return layer.name == child.key(); });
  if (same) return;
  throw std::invalid_argument(options.profile + " is not of " + options.model +
                              ", whose layers have other names; give "
                              "the --model that was measured");
}

torch::Tensor make_batch(const Options& options) {
  const auto size = to_size(options.size);
  return torch::randn({options.batch_size, 3, size.height, size.width}, options.place().front());
}

Profile measure(const Options& options, int chunks) {
  if (!options.profile.empty()) {
    std::ifstream file(options.profile);
    if (!file) throw std::runtime_error("cannot read " + options.profile);
    auto read = profile_from_json({std::istreambuf_iterator<char>(file), {}});
    if (const auto samples = options.sizes(chunks).front(); read.samples != samples) {
      throw std::invalid_argument(
          absl::StrFormat("%s is of micro-batches of %d, but --batch-size and --chunks make micro-batches of %d; give "
                          "others, or measure",
                          options.profile, read.samples, samples));
    }
    check_names(options, read);
    return read;
  }
  const auto batch = make_batch(options);
  const auto samples = options.sizes(chunks).front();
  Percent percent(std::cerr, isatty(STDERR_FILENO) != 0, "measuring " + options.model);
  return profile(make_model(options), batch.narrow(0, 0, samples),
                 options.profiling().progress([&](double part) { percent.show(part); }));
}

Json to_json(const Candidate& candidate) {
  return {{"balance", candidate.balance}, {"chunks", candidate.chunks}, {"checkpoint", to_string(candidate.checkpoint)},
          {"seconds", candidate.seconds}, {"bubble", candidate.bubble}, {"bytes", candidate.bytes},
          {"fits", candidate.fits}};
}

int run_profile(const Options& options) {
  if (!options.output.empty()) check_writable_file(options.output);
  const auto of_model = measure(options, options.chunks);
  const auto json = profile_to_json(of_model);
  if (!options.output.empty()) write_file(options.output, json);
  std::cout << (options.json ? json + "\n" : profile_table(of_model));
  return 0;
}

int run_cut(const Options& options) {
  const auto of_model = measure(options, options.chunks);
  const auto run = options.run(options.chunks, options.checkpoint);
  const auto balance = options.by == "time" ? balance_by_time(of_model, options.stages, run)
                                            : balance_by_size(of_model, options.stages, run);
  const auto prediction = predict(of_model, balance, run);
  if (options.json) {
    std::cout << Json{{"balance", balance},
                      {"seconds", prediction.seconds},
                      {"bubble", prediction.bubble},
                      {"stages", prediction.stages},
                      {"bytes", prediction.bytes}}
              << "\n";
    return 0;
  }
  std::cout << "balance " << balance_to_text(balance) << "; " << run.chunks << " chunks, checkpoint "
            << to_string(run.checkpoint) << ":\n"
            << prediction_table(prediction);
  return 0;
}

int run_suggest(const Options& options) {
  const auto model = make_model(options);
  const auto batch = make_batch(options);
  const auto devices = options.place();
  Suggestion suggestion;
  {
    Percent percent(std::cerr, isatty(STDERR_FILENO) != 0, "measuring " + options.model);
    suggestion = suggest(model, batch, devices,
                         SuggestOptions()
                             .chunks(options.tried)
                             .memory_limit(options.memory)
                             .bandwidth(options.bandwidth * 1e9)
                             .profile(options.profiling().progress([&](double part) { percent.show(part); })));
  }
  std::vector<Measured> measured;
  if (options.refine > 0 && suggestion.fits()) {
    measured =
        refine(model, batch, devices, suggestion, options.refine, /*repeats=*/5, options.profiling().intraop_threads());
  }
  if (options.json) {
    Json json{{"reason", suggestion.reason}, {"candidates", Json::array()}, {"measured", Json::array()}};
    for (const auto& candidate : suggestion.candidates) json["candidates"].push_back(to_json(candidate));
    for (const auto& [candidate, seconds] : measured) {
      json["measured"].push_back(to_json(candidate));
      json["measured"].back()["measured_seconds"] = seconds;
    }
    std::cout << json << "\n";
  } else {
    std::cout << candidate_table(suggestion.candidates);
    for (const auto& [candidate, seconds] : measured) {
      std::cout << "measured " << seconds_to_text(seconds) << ": balance " << balance_to_text(candidate.balance) << ", "
                << candidate.chunks << " chunks, checkpoint " << to_string(candidate.checkpoint) << "\n";
    }
  }
  if (suggestion.fits()) return 0;
  std::cerr << "error: " << suggestion.reason << "\n";
  return 1;
}

int run_sweep(const Options& options) {
  const auto devices = options.place();
  SearchOptions search{.stages = options.stages, .memory_limit = options.memory};
  for (const auto& device : devices) {
    search.devices.push_back(device.is_cpu() ? std::to_string(search.devices.size()) : device.str());
  }
  std::set<int> counts;  // of micro-batches, which are fewer than chunks where there are too few images
  for (const int chunks : options.tried.empty() ? std::vector<int>{2, 4, 8} : options.tried) {
    counts.insert(static_cast<int>(options.sizes(chunks).size()));
  }
  auto each = options;
  each.seconds /= static_cast<double>(counts.size());
  std::vector<Candidate> candidates;
  for (const int chunks : counts) {
    const auto of_model = measure(each, chunks);
    const StageCost stage(of_model);
    for (const auto& [name, checkpoint] : checkpoints()) {
      const auto run = options.run(chunks, checkpoint);
      const auto best = balance_by_time(of_model, options.stages, run);
      auto balances = stage.near(best, options.near);
      balances.push_back(best);
      for (const auto& balance : balances) candidates.push_back(make_candidate(of_model, balance, run, search));
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), is_better);
  if (options.json) {
    auto json = Json::array();
    for (const auto& candidate : candidates) json.push_back(to_json(candidate));
    std::cout << json << "\n";
  } else {
    std::cout << candidate_table(candidates);
  }
  return 0;
}

void add_model_flags(CLI::App& app, Options& options) {
  std::vector<std::string> names = {"unet"};
  for (const auto& [name, make] : kResNets) names.push_back(name);
  app.add_option("--model", options.model, "unet, or resnet18, 34, 50, 101, 152")->check(CLI::IsMember(names));
  app.add_option("--channels", options.channels, "of the U-Net, at full resolution")->transform(whole_number(1, 4096));
  app.add_option("--size", options.size, "of the images, in pixels")->transform(image_size_text());
  app.add_option("-b,--batch-size", options.batch_size, "images in a mini-batch")
      ->transform(whole_number(1, kMaxCount));
  app.add_option("--stages", options.stages, "parts that the model is cut into, one a device")
      ->transform(whole_number(1, 1024));
  app.add_option("--devices", options.devices,
                 "one a stage, as cuda:0,cuda:1, or one for all; without it the GPUs in turn, or the CPU")
      ->always_capture_default(false);
  app.add_option("--seconds", options.seconds, "that measuring may take, about")->transform(non_negative_number());
  app.add_option("--param-scale", options.param_scale,
                 "bytes for each of a parameter, with its gradient and what the optimizer keeps: SGD 2, Adam 4")
      ->transform(number_between(2, 100));
  app.add_flag_callback(
      "--reuse-memory", [] { reuse_cpu_memory(); }, "keep the memory of CPU tensors for the next");
  app.add_flag("--json", options.json, "for programs");
}

void add_run_flags(CLI::App& app, Options& options) {
  app.add_option("--bandwidth", options.bandwidth, "between devices in GB/s; 0: what is sent is there at once")
      ->transform(non_negative_number());
}

void add_limit_flag(CLI::App& app, Options& options) {
  app.add_option("--memory-limit", options.memory, "of a device, as 6GB or 6GiB")->transform(CLI::AsSizeValue(true));
}

void add_profile_flag(CLI::App& app, Options& options) {
  app.add_option("--profile", options.profile, "a file that 'profile --output' wrote, instead of measuring")
      ->check(CLI::ExistingFile)
      ->always_capture_default(false);
}

void add_checkpoint_flag(CLI::App& app, Options& options) {
  app.add_option("--checkpoint", options.checkpoint, "never, except_last, always")
      ->transform(CLI::CheckedTransformer(checkpoints()))
      ->default_str(to_string(options.checkpoint));
}

void add_chunks_flag(CLI::App& app, Options& options) {
  app.add_option("--chunks", options.chunks, "micro-batches in a mini-batch")->transform(whole_number(1, kMaxCount));
}

void add_chunks_list(CLI::App& app, Options& options, const std::string& all) {
  app.add_option("--chunks", options.tried, "numbers of micro-batches to try, as 2,4; without it " + all)
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->transform(whole_number(1, kMaxCount))
      ->always_capture_default(false);
}

int main(int argc, char** argv) {
  CLI::App app("What the layers of a model cost, how to cut it, and what a step is predicted to cost.",
               "gpipe-balance");
  Options options;
  app.require_subcommand(1);
  app.option_defaults()->always_capture_default();
  int (*run)(const Options&) = nullptr;
  const auto command = [&](const std::string& name, const std::string& what, int (*function)(const Options&)) {
    auto* sub = app.add_subcommand(name, what);
    // A flag given twice: the last one counts.
    sub->option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    sub->callback([&run, function] { run = function; });
    add_model_flags(*sub, options);
    return sub;
  };
  auto* profiling = command("profile", "measure each layer, for micro-batches of one size", run_profile);
  add_chunks_flag(*profiling, options);
  profiling->add_option("-o,--output", options.output, "file to write the profile to, as JSON")
      ->transform(path_name())
      ->always_capture_default(false);
  auto* cutting = command("cut", "the best balance for stages of equal time or memory, and its prediction", run_cut);
  add_chunks_flag(*cutting, options);
  add_run_flags(*cutting, options);
  add_profile_flag(*cutting, options);
  add_checkpoint_flag(*cutting, options);
  cutting->add_option("--by", options.by, "time or size")->check(CLI::IsMember({"time", "size"}));
  auto* suggesting = command("suggest", "the fastest balance, chunks and checkpoint mode", run_suggest);
  add_chunks_list(*suggesting, options, "1, 2, 4, .. 32");
  add_run_flags(*suggesting, options);
  add_limit_flag(*suggesting, options);
  suggesting->add_option("--refine", options.refine, "run so many of the best, and say what they took")
      ->transform(whole_number(0, 100));
  auto* sweeping =
      command("sweep", "predictions of the balances near the best, for all chunks and checkpoint modes", run_sweep);
  add_chunks_list(*sweeping, options, "2, 4, 8");
  add_run_flags(*sweeping, options);
  add_limit_flag(*sweeping, options);
  sweeping->add_option("--near", options.near, "layers that a cut moves by, at most")->transform(whole_number(0, 1000));
  return run_program(app, argc, argv, [&] { return run(options); });
}

}  // namespace
}  // namespace gpipe::examples::balance

int main(int argc, char** argv) { return gpipe::examples::balance::main(argc, argv); }
