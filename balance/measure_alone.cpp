
#include "absl/strings/str_format.h"
#include "balance/measurement.h"
#include "balance/memory_trace.h"
#include "balance/trial.h"
#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/random_scope.h"
#include "gpipe/base/checks.h"
#include "gpipe/run/step_input.h"

namespace gpipe {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Registers the parameters and buffers of another module, under other names.
struct Shell : torch::nn::Module {
  explicit Shell(std::shared_ptr<torch::nn::Module> module) : inner(std::move(module)) {
    int i = 0;
    for (auto& parameter : inner->parameters()) {
      register_parameter("parameter" + std::to_string(i++), parameter, parameter.requires_grad());
    }
    for (auto& buffer : inner->buffers()) register_buffer("buffer" + std::to_string(i++), buffer);
  }
  void train(bool on) override {
    torch::nn::Module::train(on);
    inner->train(on);
  }

  const std::shared_ptr<torch::nn::Module> inner;
};

/// Sink node that discards incoming gradients.
struct Discard : Node {
  variable_list apply(variable_list&&) override { return {}; }
};

/// Passes gradients on to a layer's outputs, and ones to its stashed tensors.
struct AddOnes : Node {
  variable_list apply(variable_list&& gradients) override {
    for (const auto& [sizes, options] : stashed) gradients.push_back(at::ones(sizes, options));
    return std::move(gradients);
  }
  std::vector<std::pair<std::vector<std::int64_t>, at::TensorOptions>> stashed;
};

/// Skips between their stash and their last reader.
using Skips = std::map<SkipKey, at::Tensor>;

class LoneContext : public SkipContext {
 public:
  LoneContext(const Skips& entering, Skips* leaving) : entering_(entering), leaving_(leaving) {}

  void stash(const SkipKey& key, at::Tensor tensor) override {
    own_[key] = tensor;
    if (leaving_ != nullptr) (*leaving_)[key] = tensor.defined() ? tensor.detach() : tensor;
    if (tensor.defined() && tensor.requires_grad()) stashed.push_back(std::move(tensor));
  }
  at::Tensor pop(const SkipKey& key) override { return peek(key); }
  at::Tensor peek(const SkipKey& key) override {
    if (const auto own = own_.find(key); own != own_.end()) return own->second;
    const auto found = entering_.find(key);
    if (found == entering_.end()) throw_error("skip ", to_string(key), " is read but no earlier layer stashed it");
    if (!found->second.defined()) return {};
    auto tensor = found->second.clone();
    if (at::GradMode::is_enabled() && (tensor.is_floating_point() || tensor.is_complex())) {
      torch::autograd::set_history(tensor, make_node<Discard>());
    }
    return tensor;
  }

  std::vector<at::Tensor> stashed;

 private:
  const Skips& entering_;
  Skips* const leaving_;
  Skips own_;
};

/// Makes a layer a model of its own. It reads copies of the `entering` skips, whose gradients are discarded. Its
/// stashed tensors receive a gradient of ones in the backward, and go to `leaving` unless that is null. Its module has
/// the layer's parameters, buffers and training mode, but declares no skips. Both maps must outlive it.
std::unique_ptr<Layer> isolated(std::unique_ptr<Layer> layer, const Skips& entering, Skips* leaving) {
  const auto forward = [&entering, leaving](Layer& layer, Value input) {
    LoneContext context(entering, leaving);
    const SkipContextGuard guard(context);
    auto output = layer.forward(std::move(input));
    if (context.stashed.empty()) return output;
    const auto node = make_node<AddOnes>();
    output = append_node(output, node);
    for (const auto& stashed : context.stashed) {
      node->add_next_edge(torch::autograd::impl::gradient_edge(stashed));
      node->stashed.emplace_back(stashed.sizes().vec(), stashed.options());
    }
    return output;
  };
  auto module = std::make_shared<Shell>(layer->module());
  return decorate(std::move(layer), forward, std::move(module));
}

// Appends the profile of a layer that was measured alone. Which layers share memory is unknown, so bytes are upper
// bounds: an output is kept for the next layer's backward, a skip in memory of its own for its first reader's.
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
    const auto readers = distinct_readers(link);
    if (link.from == index || readers.back() != index) continue;
    const auto& skip = skips.at(link.key);
    const auto bytes = bytes_of(skip);
    const bool wants_gradient = skip.defined() && skip.is_floating_point();
    whole.skips.push_back({link.key.name, link.from, readers, bytes, /*changed=*/false, wants_gradient});
    whole.blocks.push_back({bytes, Kind::F, link.from, Kind::B, readers.front(), link.from, readers});
    if (wants_gradient) {
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
    std::throw_with_nested(std::runtime_error(absl::StrFormat(
        "[profile] layer '%s' alone does not fit its device for %d samples; use a smaller layer or sample: %s", name,
        samples, error.what_without_backtrace())));
  }
}

}  // namespace

Profile measure_alone(const Model& model, const Value& sample, const ProfileOptions& options) {
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
      lone = restore.wrap(std::move(lone));
      lone.front() = isolated(std::move(lone.front()), skips, leaving);
      return lone;
    };
    auto tensors = value.tensors();
    for (auto& tensor : tensors) {
      if (i > 0 && tensor.is_floating_point()) tensor = tensor.detach().set_requires_grad(true);
    }
    auto of_layer = alone(named[i].name, sample_size, [&] {
      return measure([&] { return make(nullptr); }, Value(value.form(), tensors), each, false);
    });
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
      if (link.readers.back() == i) skips.erase(link.key);
    }
    skips.merge(leaving);
    restore.check();
  }
  const auto device = sample.tensors().front().device();
  find_sharing(whole, named, device.is_cpu() || options.lends_between_devices());
  return whole;
}

}  // namespace gpipe
