#include "gpipe/snapshot.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <sstream>

#include "gpipe/base/checks.h"
#include "gpipe/base/json.h"
#include "gpipe/snapshot/safetensors.h"

namespace gpipe {
namespace {

using nlohmann::json;

constexpr std::int64_t kVersion = 2;  // version 1 was a zip archive
// A name in a model's state does not begin with a dot, and the name of a field has none.
constexpr std::string_view kOptimizer = ".optimizer.";  // and the field's name, a dot and the parameter's name
constexpr std::string_view kHistory = ".history.";
constexpr char kRandom[] = ".random";

[[noreturn]] void refuse_content(const std::string& what) { throw_error("not a snapshot: ", what); }

json to_json(const std::string& name, const c10::IValue& value) {
  if (value.isNone()) return nullptr;
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isString()) return value.toStringRef();
  if (value.isDouble() && std::isfinite(value.toDouble())) return value.toDouble();
  if (value.isTuple()) {
    auto items = json::array();
    for (const auto& item : value.toTupleRef().elements()) items.push_back(to_json(name, item));
    return items;
  }
  throw_error("'", name, "' of the optimizer cannot be saved: it is not a finite number, a string, or a tuple of them");
}

template <class Value>
Value get(const json& from, const std::string& name) {
  if constexpr (std::is_same_v<Value, std::int64_t>) {
    const bool fits = !from.is_number_unsigned() || from.get<std::uint64_t>() <= std::numeric_limits<Value>::max();
    if (!from.is_number_integer() || !fits)
      refuse_content("'" + name + "' is " + from.dump() + ", not an int of 64 bits");
  } else {
    if (!from.is_string()) refuse_content("'" + name + "' is " + from.dump() + ", not a string");
  }
  return from.get<Value>();
}

c10::IValue to_ivalue(const json& from, const std::string& name) {
  if (from.is_null()) return {};
  if (from.is_boolean()) return from.get<bool>();
  if (from.is_number_float()) return from.get<double>();
  if (from.is_number_integer()) return get<std::int64_t>(from, name);
  if (from.is_string()) return from.get<std::string>();
  if (!from.is_array()) refuse_content("'" + name + "' of the optimizer is " + from.dump());
  std::vector<c10::IValue> items;
  for (const auto& item : from) items.push_back(to_ivalue(item, name));
  return c10::ivalue::Tuple::create(std::move(items));
}

const json& member(const json& from, const char* key, json::value_t type) {
  if (!from.is_object() || !from.contains(key)) refuse_content(std::string("it has no '") + key + "'");
  if (from.at(key).type() != type) refuse_content(std::string("its '") + key + "' is " + from.at(key).dump());
  return from.at(key);
}

template <class Value>
std::map<std::string, Value> to_map(const json& from, const char* key) {
  std::map<std::string, Value> map;
  for (const auto& [name, value] : member(from, key, json::value_t::object).items())
    map[name] = get<Value>(value, name);
  return map;
}

OptimizerState to_optimizer(const json& from) {
  OptimizerState optimizer;
  optimizer.type = member(from, "type", json::value_t::string);
  for (const auto& group : member(from, "param_groups", json::value_t::array)) {
    auto& to = optimizer.param_groups.emplace_back();
    for (const auto& name : member(group, "params", json::value_t::array))
      to.params.push_back(get<std::string>(name, "params"));
    for (const auto& [name, value] : group.items()) {
      if (name != "params") to.options[name] = to_ivalue(value, name);
    }
  }
  for (const auto& [parameter, fields] : member(from, "state", json::value_t::object).items()) {
    if (!fields.is_object()) refuse_content("the state of '" + parameter + "' is " + fields.dump());
    auto& to = optimizer.state[parameter];
    for (const auto& [name, value] : fields.items()) to[name] = to_ivalue(value, name);
  }
  return optimizer;
}

void place(Snapshot& snapshot, const std::string& name, at::Tensor tensor) {
  if (!name.starts_with('.')) {
    snapshot.model.insert(name, std::move(tensor));
  } else if (name == kRandom) {
    snapshot.random = std::move(tensor);
  } else if (name.starts_with(kOptimizer)) {
    const auto field = name.substr(kOptimizer.size());
    const auto dot = field.find('.');
    if (dot == field.npos) refuse_content("the tensor '" + name + "' belongs to no field");
    snapshot.optimizer.state[field.substr(dot + 1)][field.substr(0, dot)] = std::move(tensor);
  } else if (name.starts_with(kHistory) && tensor.scalar_type() == at::kDouble && tensor.dim() == 1) {
    const auto* values = tensor.const_data_ptr<double>();
    snapshot.history[name.substr(kHistory.size())].assign(values, values + tensor.numel());
  } else {
    refuse_content("the tensor '" + name + "' belongs to no field");
  }
}

template <class Read>
auto reading(const std::filesystem::path& path, Read read) {
  std::string reason;
  try {
    return read();
  } catch (const std::system_error& error) {
    reason = error.code().message();
  } catch (const std::exception& error) {
    reason = reason_of(error.what());
  }
  throw_error("cannot read '", path.string(), "': ", reason);
}

}  // namespace

Safetensors to_safetensors(const Snapshot& snapshot) {
  Safetensors file;
  for (const auto& item : snapshot.model) {
    if (item.key().starts_with('.')) throw_error("the model's tensor '", item.key(), "' begins with a dot");
    file.tensors.emplace(item.key(), item.value());
  }
  if (snapshot.random.defined()) file.tensors.emplace(kRandom, snapshot.random);
  for (const auto& [name, values] : snapshot.history) {
    file.tensors.emplace(std::string(kHistory) + name, at::tensor(values, at::kDouble));
  }
  auto state = json::object();
  for (const auto& [parameter, fields] : snapshot.optimizer.state) {
    auto& numbers = state[parameter] = json::object();
    for (const auto& [name, value] : fields) {
      if (value.isTensor()) {
        if (name.find('.') != name.npos) throw_error("the optimizer's field '", name, "' has a dot");
        file.tensors.emplace(std::string(kOptimizer) + name + "." + parameter, value.toTensor());
      } else {
        numbers[name] = to_json(name, value);
      }
    }
  }
  auto groups = json::array();
  for (const auto& group : snapshot.optimizer.param_groups) {
    auto& to = groups.emplace_back(json::object());
    for (const auto& [name, value] : group.options) to[name] = to_json(name, value);
    to["params"] = group.params;
  }
  const json training = {
      {"version", kVersion},
      {"epoch", snapshot.epoch},
      {"position", snapshot.position},
      {"options", snapshot.options},
      {"optimizer", {{"type", snapshot.optimizer.type}, {"param_groups", groups}, {"state", state}}},
  };
  try {
    file.training = training.dump();
  } catch (const json::type_error&) {
    throw_error("a name or text is not UTF-8");
  }
  return file;
}

Snapshot from_safetensors(Safetensors file) {
  if (file.training.empty()) refuse_content("the file has only weights, which read_weights() reads");
  const auto training = json_or_null(file.training);
  if (!training.is_object()) refuse_content("its 'training' is not a JSON object of at most 100 levels");
  const auto version = get<std::int64_t>(training.value("version", json()), "version");
  if (version > kVersion) {
    throw_error("the file has version ", version, ", but this program reads versions up to ", kVersion,
                ": use a newer version of the program");
  }
  Snapshot snapshot;
  snapshot.epoch = get<std::int64_t>(training.value("epoch", json()), "epoch");
  snapshot.position = to_map<std::int64_t>(training, "position");
  snapshot.options = to_map<std::string>(training, "options");
  snapshot.optimizer = to_optimizer(member(training, "optimizer", json::value_t::object));
  for (auto& [name, tensor] : file.tensors) place(snapshot, name, std::move(tensor));
  return snapshot;
}

at::Tensor capture_random() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void restore_random(const at::Tensor& saved) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  try {
    generator.set_state(saved);
  } catch (const c10::Error& error) {
    refuse_argument("not a state of the CPU's random number generator: ", error.what_without_backtrace());
  }
}

void write_snapshot(const std::filesystem::path& path, const Snapshot& snapshot) {
  try {
    write_safetensors(path, to_safetensors(snapshot));
  } catch (const std::system_error&) {
    throw;  // names the path
  } catch (const std::runtime_error& error) {
    throw_error("cannot write the snapshot '", path.string(), "': ", reason_of(error.what()));
  }
}

Snapshot read_snapshot(const std::filesystem::path& path) {
  return reading(path, [&] { return from_safetensors(read_safetensors(path)); });
}

NamedTensors read_weights(const std::filesystem::path& path) {
  return reading(path, [&] {
    NamedTensors weights("Tensor");
    for (auto& [name, tensor] : read_safetensors(path).tensors) {
      if (!name.starts_with('.')) weights.insert(name, tensor);
    }
    return weights;
  });
}

std::string to_bytes(const Snapshot& snapshot) {
  std::string bytes;
  write_safetensors(to_safetensors(snapshot),
                    [&](const void* data, std::size_t size) { bytes.append(static_cast<const char*>(data), size); });
  return bytes;
}

Snapshot from_bytes(std::string_view bytes) {
  std::istringstream stream{std::string(bytes)};
  return from_safetensors(read_safetensors(stream, bytes.size()));
}

}  // namespace gpipe
