#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "gpipe/assembly/workers.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/json.h"
#include "gpipe/error_info.h"
#include "gpipe/graph/graph_layer.h"
#include "gpipe/model.h"
#include "gpipe/snapshot/safetensors.h"

namespace gpipe {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kModelVersion = 1;

std::string without_dot(const std::string& name) { return name.starts_with('.') ? name.substr(1) : name; }

/// The tensors of a model file. Those of other ranks' layers only are on the meta device and are not read.
class Tensors {
 public:
  /// `own` has the indices of this rank's layers, if it has not all.
  Tensors(SafetensorsFile& file, const Json& layers, const std::set<std::size_t>* own) : file_(file) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      for (const auto& each : layers[i].at("tensors")) {
        const auto name = each.at(0).get<std::string>();
        const auto tied = each.at(2).is_null() ? sources_.end() : sources_.find(each.at(2).get<std::string>());
        if (each.at(2).is_null() ? !file.contains(name) : tied == sources_.end()) {
          refuse_argument("the tensor of '", name, "' is missing");
        }
        const auto source = tied == sources_.end() ? name : tied->second;
        sources_.emplace(name, source);
        if (own == nullptr || own->contains(i)) needed_.insert(source);
      }
    }
  }

  std::vector<GraphLayer::NamedTensor> of(const Json& layer) {
    std::vector<GraphLayer::NamedTensor> tensors;
    for (const auto& each : layer.at("tensors")) {
      const auto name = each.at(0).get<std::string>();
      const auto kind = each.at(1).get<std::string>();
      if (kind != "parameter" && kind != "frozen" && kind != "buffer")
        refuse_argument("'", name, "' is a '", kind, "'");
      const auto source = each.at(2).is_null() ? name : sources_.at(each.at(2).get<std::string>());
      auto& tensor = made_[source];
      if (!tensor.defined()) tensor = needed_.contains(source) ? file_.read(source) : file_.without_data(source);
      if (kind == "parameter") tensor.set_requires_grad(true);
      tensors.push_back({without_dot(name), tensor, kind != "buffer"});
    }
    return tensors;
  }

 private:
  SafetensorsFile& file_;
  std::map<std::string, std::string> sources_;  // of each tensor, its name in the file
  std::set<std::string> needed_;                // those that this rank's layers have
  std::map<std::string, at::Tensor> made_;
};

/// Errors: std::invalid_argument for an operator that reads files, or that is of none of the namespaces.
void check_operators(const Json& graph, const std::vector<std::string>& namespaces) {
  for (const auto& call : graph.value("calls", Json::array())) {
    if (!call.contains("operator")) continue;
    const auto name = call["operator"].get<std::string>();
    const auto of = name.substr(0, name.find("::"));
    if (name.substr(0, name.find('.')) == "aten::from_file") {
      refuse_argument("it calls aten::from_file, which reads other files");
    }
    if (of != "aten" && of != "prims" && std::ranges::find(namespaces, of) == namespaces.end()) {
      refuse_argument("it calls ", name, "; if you trust it, give load_model() the namespace '", of, "'");
    }
  }
}

torch::nn::Sequential read_model(SafetensorsFile file, const std::vector<std::string>& namespaces,
                                 const std::set<std::size_t>* own) {
  if (file.text("model").empty()) refuse_argument("it is not a model; python -m gpipe export writes one");
  auto model = parse_json(file.text("model"));
  const auto version = model.at("version").get<std::int64_t>();
  if (version != kModelVersion) {
    refuse_argument("it has version ", version, ", but this library reads version ", kModelVersion);
  }
  torch::nn::Sequential layers;
  const Namespace of_model;
  const auto count = model.at("layers").size();
  if (count == 0) refuse_argument("it has no layers");
  Tensors tensors(file, model["layers"], own);
  for (auto& each : model["layers"]) {
    check_operators(each.at("graph"), namespaces);
    each["place"] = {layers->size(), count};
    auto layer = std::make_shared<GraphLayer>(each.at("graph").dump(), tensors.of(each), each.dump());
    layer->isolate(of_model);
    layers->push_back(each.at("name").get<std::string>(), std::move(layer));
  }
  return layers;
}

torch::nn::Sequential load(const std::filesystem::path& path, const std::vector<std::string>& namespaces,
                           const std::set<std::size_t>* own) {
  try {
    return read_model(SafetensorsFile(path), namespaces, own);
  } catch (const std::exception&) {
    throw_error("cannot load the model '", path.string(), "': ", reason_of(message_of(std::current_exception())));
  }
}

}  // namespace

torch::nn::Sequential load_model(const std::filesystem::path& path, const std::vector<std::string>& namespaces) {
  return load(path, namespaces, nullptr);
}

torch::nn::Sequential load_model(const std::filesystem::path& path, const std::vector<std::int64_t>& balance,
                                 const GPipeOptions& options, const std::vector<std::string>& namespaces) {
  const auto workers = arrange_workers(options, balance.size());
  std::set<std::size_t> own;
  std::size_t layer = 0;
  for (std::size_t s = 0; s < balance.size(); ++s) {
    for (std::int64_t i = 0; i < balance[s]; ++i, ++layer) {
      if (workers.is_here(workers.schedules.placement[s])) own.insert(layer);
    }
  }
  return load(path, namespaces, &own);
}

void save_model(const std::filesystem::path& path, const torch::nn::Module& model) {
  Safetensors file;
  auto layers = Json::array();
  std::size_t tensors = 0;
  bool is_whole = true;
  for (const auto& module : model.modules(/*include_self=*/false)) {
    const auto* layer = module->as<GraphLayer>();
    if (layer == nullptr) continue;
    auto source = parse_json(layer->source());
    is_whole = is_whole && source["place"][0] == layers.size();
    auto& listed = source["tensors"];
    for (std::size_t i = 0; i < listed.size(); ++i) {
      const auto& [name, tensor, is_parameter] = layer->tensors()[i];
      file.tensors.emplace(listed[i][0].get<std::string>(), tensor);
      if (is_parameter) listed[i][1] = tensor.requires_grad() ? "parameter" : "frozen";
    }
    tensors += layer->parameters().size() + layer->buffers().size();
    layers.push_back(std::move(source));
  }
  is_whole = is_whole && !layers.empty() && layers.back()["place"][1] == layers.size();
  if (!is_whole || tensors != model.parameters().size() + model.buffers().size()) {
    refuse_argument("save_model() needs all layers of one model from load_model(), and no others");
  }
  file.model = Json{{"version", kModelVersion}, {"layers", std::move(layers)}}.dump();
  write_safetensors(path, file);
}

}  // namespace gpipe
