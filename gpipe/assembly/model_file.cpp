#include <algorithm>
#include <map>
#include <utility>

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

/// Takes the tensors of a layer from the file. `earlier` has the tensors of all layers so far.
std::vector<GraphLayer::NamedTensor> tensors_of(const Json& layer, const std::map<std::string, at::Tensor>& file,
                                                std::map<std::string, at::Tensor>& earlier) {
  std::vector<GraphLayer::NamedTensor> tensors;
  for (const auto& each : layer.at("tensors")) {
    const auto name = each.at(0).get<std::string>();
    const auto kind = each.at(1).get<std::string>();
    if (kind != "parameter" && kind != "frozen" && kind != "buffer") refuse_argument("'", name, "' is a '", kind, "'");
    const auto& source = each.at(2).is_null() ? file : earlier;
    const auto found = source.find(each.at(2).is_null() ? name : each.at(2).get<std::string>());
    if (found == source.end()) refuse_argument("the tensor of '", name, "' is missing");
    auto tensor = found->second;
    if (kind == "parameter") tensor.set_requires_grad(true);
    earlier.emplace(name, tensor);
    tensors.push_back({without_dot(name), std::move(tensor), kind != "buffer"});
  }
  return tensors;
}

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

torch::nn::Sequential read_model(Safetensors file, const std::vector<std::string>& namespaces) {
  if (file.model.empty()) refuse_argument("it is not a model; python -m gpipe export writes one");
  auto model = parse_json(file.model);
  const auto version = model.at("version").get<std::int64_t>();
  if (version != kModelVersion) {
    refuse_argument("it has version ", version, ", but this library reads version ", kModelVersion);
  }
  torch::nn::Sequential layers;
  std::map<std::string, at::Tensor> earlier;
  const Namespace of_model;
  const auto count = model.at("layers").size();
  if (count == 0) refuse_argument("it has no layers");
  for (auto& each : model["layers"]) {
    check_operators(each.at("graph"), namespaces);
    each["place"] = {layers->size(), count};
    auto layer =
        std::make_shared<GraphLayer>(each.at("graph").dump(), tensors_of(each, file.tensors, earlier), each.dump());
    layer->isolate(of_model);
    for (const auto& path : each.at("evaluation")) layer->place(path).train(false);
    layers->push_back(each.at("name").get<std::string>(), std::move(layer));
  }
  return layers;
}

}  // namespace

torch::nn::Sequential load_model(const std::filesystem::path& path, const std::vector<std::string>& namespaces) {
  try {
    return read_model(read_safetensors(path), namespaces);
  } catch (const std::exception&) {
    throw_error("cannot load the model '", path.string(), "': ", reason_of(message_of(std::current_exception())));
  }
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
    source["evaluation"] = layer->in_evaluation();
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
