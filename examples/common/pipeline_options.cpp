#include "examples/common/pipeline_options.h"

#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <iostream>
#include <numeric>
#include <system_error>
#include <utility>

#include "absl/strings/str_join.h"
#include "balance/report.h"
#include "examples/common/files.h"
#include "examples/common/flags.h"
#include "gpipe/assembly/workers.h"
#include "gpipe/memory_reuse.h"
#include "gpipe/ranks.h"
#include "gpipe/schedule/schedule_source.h"
#include "gpipe/schedules.h"

namespace gpipe::examples {
namespace {

std::vector<std::int64_t> to_counts(const std::string& text) {
  std::vector<std::int64_t> counts;
  for (const auto& part : CLI::detail::split(text, ',')) {
    const auto count = to_whole_number(part);
    if (!count || *count < 1 || *count > static_cast<std::uint64_t>(kMaxCount)) {
      throw CLI::ValidationError(
          "--balance", "must be auto, by-time, by-size or layers per stage such as 20,35, but has '" + part + "'");
    }
    counts.push_back(static_cast<std::int64_t>(*count));
  }
  return counts;
}

// CLI11 puts "FLAG: " before a message. A message that begins with "must" continues the flag's name.
std::string joined(std::string message) {
  if (const auto colon = message.find(": must "); colon != std::string::npos) message.erase(colon, 1);
  return message;
}

// Checks the options that only together can be wrong.
void check_schedule(const PipelineOptions& options) {
  const auto per_worker = std::to_string(options.stages_per_worker);
  if (options.schedule.starts_with('@') && options.stages_per_worker != 1) {
    throw CLI::ValidationError("--stages-per-worker",
                               "must be 1 with a schedule from a file, which places the stages, but is " + per_worker);
  }
  if (options.schedule == kAuto && options.balance != kAuto) {
    throw CLI::ValidationError("--schedule",
                               "must not be auto without --balance auto; choose one of " + schedule_names());
  }
  if (options.schedule == kAuto && options.stages_per_worker != 1) {
    throw CLI::ValidationError("--stages-per-worker",
                               "must be 1 with --schedule auto, which chooses it, but is " + per_worker);
  }
  if (options.stages % options.stages_per_worker != 0) {
    throw CLI::ValidationError("--stages-per-worker", "must divide the number of stages, which is " +
                                                          std::to_string(options.stages) + ", but is " + per_worker);
  }
  if (options.balance == kAuto && options.schedule.starts_with('@')) {
    throw CLI::ValidationError(
        "--balance",
        "must not be auto with a schedule from a file, which has one number of micro-batches; give "
        "by-time, by-size or layers per stage");
  }
}

}  // namespace

std::string schedule_names() {
  return absl::StrJoin(schedule_rules(), ", ",
                       [](std::string* out, const ScheduleRule& rule) { out->append(rule.name); });
}

std::vector<torch::Device> to_devices(const std::string& text, int count, const std::string& unit) {
  std::vector<torch::Device> devices;
  for (const auto& part : CLI::detail::split(text, ',')) {
    try {
      devices.emplace_back(part);
    } catch (const std::exception&) {
      throw CLI::ValidationError("--devices", "must be cpu, cuda or cuda:N, but has '" + part + "'");
    }
  }
  if (devices.size() == 1) devices.resize(count, devices.front());
  if (static_cast<int>(devices.size()) != count) {
    throw CLI::ValidationError("--devices", "must be one per " + unit + ", or one for all, but there are " +
                                                std::to_string(devices.size()) + " for " + std::to_string(count) + " " +
                                                unit + "s");
  }
  return devices;
}

void add_pipeline_options(CLI::App& app, PipelineOptions& options) {
  // The last of repeated flags counts, so that a script's own can be overridden.
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(34);

  app.add_option("-b,--batch-size", options.batch_size, "images per mini-batch")->transform(whole_number(1, kMaxCount));
  app.add_option("--stages", options.stages, "number of stages that the model is cut into")
      ->transform(whole_number(1, 1024))
      ->group(kPipelineGroup);
  app.add_option(
         "--balance",
         "how to cut: by-time or by-size, into stages of equal measured time or memory; auto, the fastest of all "
         "balances, chunks and checkpoint modes; or layers per stage, such as 20,35")
      ->default_str(options.balance)
      ->type_name("HOW")
      ->group(kPipelineGroup);
  app.add_option("--chunks", options.chunks, "micro-batches per mini-batch")
      ->transform(whole_number(1, kMaxCount))
      ->group(kPipelineGroup);
  app.add_option("--devices",
                 "one per worker, such as cuda:0,cuda:1, or one for all; by default the GPUs in turn, or the CPU")
      ->type_name("LIST")
      ->group(kPipelineGroup);
  app.add_flag_callback(
         "--reuse-memory", [] { reuse_cpu_memory(); }, "keep freed memory of CPU tensors for reuse")
      ->group(kPipelineGroup);

  app.final_callback([&app, &options] {
    if (app.count("--balance") > 0) {
      options.balance = app["--balance"]->as<std::string>();
    }
    if (options.balance != kAuto && options.balance != kByTime && options.balance != kBySize) {
      options.layers = to_counts(std::exchange(options.balance, ""));
      const auto cuts = static_cast<int>(options.layers.size());
      if (app.count("--stages") > 0 && options.stages != cuts) {
        throw CLI::ValidationError("--balance", "must have as many stages as --stages, but has " +
                                                    std::to_string(cuts) + ", and --stages is " +
                                                    std::to_string(options.stages) + "; give one of the two");
      }
      options.stages = cuts;
    }
    check_schedule(options);
    const int workers = worker_count(options);
    if (app.count("--devices") > 0) {
      options.devices =
          to_devices(app["--devices"]->as<std::string>(), workers, workers == options.stages ? "stage" : "worker");
    }
  });
}

int worker_count(const PipelineOptions& options) {
  if (options.schedule == kAuto) return options.stages;
  const auto placement = schedule_source(options.schedule, options.stages, options.stages_per_worker).placement;
  return *std::max_element(placement.begin(), placement.end()) + 1;
}

std::vector<torch::Device> place(const PipelineOptions& options) {
  if (!options.devices.empty()) return options.devices;
  const int workers = worker_count(options);
  std::vector<torch::Device> devices(workers, torch::kCPU);
  for (int w = 0; torch::cuda::is_available() && w < workers; ++w) {
    devices[w] = torch::Device(torch::kCUDA, static_cast<torch::DeviceIndex>(w % torch::cuda::device_count()));
  }
  return devices;
}

void print_stages(std::ostream& out, const std::string& name, const torch::nn::Module& model, const GPipe& pipe,
                  const std::optional<Prediction>& prediction) {
  const auto layers = model.children();
  const auto count = [](const std::vector<torch::Tensor>& parameters) {
    return std::accumulate(parameters.begin(), parameters.end(), std::int64_t{0},
                           [](std::int64_t sum, const torch::Tensor& parameter) { return sum + parameter.numel(); });
  };
  out << "model: " << name << ", " << layers.size() << " layers, " << count(model.parameters()) << " parameters\n";
  const auto& placement = pipe->placement();
  const auto& job = pipe->options().ranks();
  const auto ranks = job ? ranks_of_workers(static_cast<int>(pipe->devices().size()), *job) : std::vector<int>();
  std::vector<int> one_per_worker(placement.size());
  std::iota(one_per_worker.begin(), one_per_worker.end(), 0);
  auto layer = layers.begin();
  for (std::size_t s = 0; s < pipe->balance().size(); ++s) {
    std::int64_t parameters = 0;
    for (std::int64_t i = 0; i < pipe->balance()[s]; ++i) parameters += count((*layer++)->parameters());
    out << "stage " << s << ": " << pipe->balance()[s] << " layers, " << parameters << " parameters, on ";
    if (placement != one_per_worker) out << "worker " << placement[s] << ", ";
    if (pipe->is_here(static_cast<int>(s))) {
      out << pipe->devices()[placement[s]].str();
    } else {
      out << "rank " << ranks[placement[s]];
    }
    if (prediction) {
      out << "; predicted: " << seconds_to_text(prediction->stages.at(s)) << " per micro-batch";
      if (placement == one_per_worker) out << ", " << bytes_to_text(prediction->bytes.at(s));
    }
    out << "\n";
  }
  if (prediction && placement != one_per_worker) {
    const auto add_bytes = [](std::string* text, std::int64_t bytes) { text->append(bytes_to_text(bytes)); };
    out << "predicted memory per worker: " << absl::StrJoin(prediction->bytes, ", ", add_bytes) << "\n";
  }
  out << std::flush;
}

int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& run) {
  std::signal(SIGXFSZ, SIG_IGN);  // so that writing too large a file is an error
  app.failure_message([](const CLI::App*, const CLI::Error& error) { return "error: " + joined(error.what()) + "\n"; });
  try {
    app.parse(argc, argv);
    const int code = run();
    if (std::cout.flush()) return code;
    std::cerr << "error: cannot write to standard output" << std::endl;
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  } catch (const std::system_error& error) {
    const bool thread = error.code() == std::errc::resource_unavailable_try_again;
    std::cerr << "error: " << (thread ? "cannot start a thread: " : "") << error.what() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  remove_empty_directories();
  return 1;
}

}  // namespace gpipe::examples
