#include "balance/profiler.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "balance/layer_trace.h"
#include "balance/lone_layer.h"
#include "balance/measurement.h"
#include "balance/restore_module.h"
#include "balance/sharing.h"
#include "balance/trial.h"
#include "gpipe/autograd/random_scope.h"
#include "gpipe/run/micro_batch.h"

namespace gpipe {
namespace {

using absl::StrFormat;

constexpr double kMostParamScale = 1000;

void check(const Model& model, const Value& sample, const ProfileOptions& options) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument("[profile] " + what); };
  if (model.named_layers().empty()) refuse("the model has no layers");
  if (options.workers() < 1) refuse(StrFormat("workers must be positive, but is %d", options.workers()));
  if (options.repeats() < 1) refuse(StrFormat("repeats must be positive, but is %d", options.repeats()));
  if (options.intraop_threads() < 0) {
    refuse(
        StrFormat("intraop_threads must not be negative (0 is an equal share), but is %d", options.intraop_threads()));
  }
  if (!(options.seconds() >= 0)) refuse(StrFormat("seconds must not be negative, but is %g", options.seconds()));
  if (!(options.param_scale() >= 2 && options.param_scale() <= kMostParamScale)) {
    refuse(StrFormat("param_scale must be from 2 (parameter and gradient) to %g, but is %g", kMostParamScale,
                     options.param_scale()));
  }
  if (batch_size(sample) < 1) refuse("the sample is empty; give one micro-batch");
}

// Appends the profile of a layer that was measured alone to the profile of the model. Which layers share memory is
// unknown, so the bytes are upper bounds: each output is kept for the next layer's backward, and each skip has memory of
// its own, kept for the backward of the layer that pops it.
void join(Profile& whole, Profile lone, bool is_last, const std::vector<SkipLink>& links, const Skips& skips) {
  const int index = static_cast<int>(whole.layers.size());
  auto& layer = whole.layers.emplace_back(std::move(lone.layers.front()));
  for (auto block : lone.blocks) {
    block.layer = index;
    block.reaches += index;
    if (block.freed_by >= 0) {
      block.freed_by = index;
    } else if (block.born == Kind::F && block.reaches > index && !is_last) {
      block.until = Kind::B;
      block.freed_by = index + 1;
      layer.saved += block.bytes;
    } else if (block.born != Kind::F && index > 0) {
      block.until = Kind::B;
      block.freed_by = index - 1;
    }
    whole.blocks.push_back(block);
  }
  for (const auto& link : links) {
    if (link.to != index || link.from == index) continue;
    const auto& skip = skips.at(link.key);
    const auto bytes = bytes_of(skip);
    whole.skips.push_back({link.key.name, link.from, link.to, bytes});
    whole.blocks.push_back({bytes, Kind::F, link.from, Kind::B, index, link.from, index});
    if (skip.defined() && skip.is_floating_point()) {
      for (const auto born : {Kind::B, Kind::I})
        whole.blocks.push_back({bytes, born, index, Kind::B, link.from, index});
    }
  }
}

// Runs one layer. Names it in the error if the device's memory is too small even for this layer.
template <typename F>
auto alone(const std::string& name, std::int64_t samples, F run) {
  try {
    return run();
  } catch (const c10::OutOfMemoryError& error) {
    std::throw_with_nested(std::runtime_error(StrFormat(
        "[profile] layer '%s' alone does not fit its device for %d samples; use a smaller layer or sample: %s", name,
        samples, error.what_without_backtrace())));
  }
}

// Measures one layer at a time.
Profile profile_alone(const Model& model, const Value& sample, const ProfileOptions& options) {
  const auto& named = model.named_layers();
  const auto links = skip_links(named);
  const int layers = static_cast<int>(named.size());
  Profile whole;
  Skips skips;
  Value value = sample;
  const auto sample_size = batch_size(sample);
  auto each = options;
  each.workers(1).seconds(options.seconds() / layers);
  for (int i = 0; i < layers; ++i) {
    const RestoreModule restore(*named[i].module);
    if (options.progress()) {
      each.progress([&](double part) { options.progress()((i + part) / layers); });
    }
    const auto make = [&](Skips* leaving) {
      std::vector<std::unique_ptr<Layer>> lone;
      lone.push_back(std::move(model.layers()[i]));
      lone = restore.watch(std::move(lone));
      lone.front() = std::make_unique<LoneLayer>(std::move(lone.front()), skips, leaving);
      return lone;
    };
    auto tensors = value.tensors();
    for (auto& tensor : tensors) {
      if (i > 0 && tensor.is_floating_point()) tensor = tensor.detach().set_requires_grad(true);
    }
    auto of_layer = alone(named[i].name, sample_size,
                          [&] { return measure([&] { return make(nullptr); }, Value(value.form(), tensors), each); });
    if (i == 0) {
      whole.samples = of_layer.samples;
      whole.device = of_layer.device;
      whole.workers = 1;
      whole.intraop_threads = of_layer.intraop_threads;
      whole.input_requires_grad = of_layer.input_requires_grad;
    }
    join(whole, std::move(of_layer), i + 1 == layers, links, skips);
    const at::NoGradGuard no_grad;
    const RandomScope random(/*seed=*/0, i, /*micro_batch=*/0);
    if (i == 0) value = copy_of(value);  // the layer may change it in place
    Skips leaving;
    value = alone(named[i].name, sample_size, [&] { return make(&leaving).front()->forward(std::move(value)); });
    for (const auto& link : links) {
      if (link.to == i) skips.erase(link.key);
    }
    skips.merge(leaving);
    restore.check();
  }
  const auto device = sample.tensors().front().device();
  find_sharing(whole, named, device.is_cpu() || options.lends_between_devices());
  return whole;
}

}  // namespace

Profile profile(const Model& model, const Value& sample, const ProfileOptions& options) {
  check(model, sample, options);
  const at::AutoGradMode grad_mode(true);
  auto rising = options;  // progress never falls back, even if the measurement starts again layer by layer
  if (rising.intraop_threads() == 0) rising.intraop_threads(std::max(1, at::get_num_threads() / rising.workers()));
  double reported = 0;
  if (options.progress()) {
    rising.progress([&](double part) {
      if (part > reported) options.progress()(reported = std::min(1.0, part));
    });
  }
  try {
    const RestoreModule restore(model.module());
    auto measured = measure([&] { return restore.watch(model.layers()); }, sample, rising);
    restore.check();
    return measured;
  } catch (const c10::OutOfMemoryError&) {
  }
  return profile_alone(model, sample, rising);
}

}  // namespace gpipe
