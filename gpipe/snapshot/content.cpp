#include "gpipe/snapshot/content.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <variant>

namespace gpipe {
namespace {

using c10::IValue;

constexpr char kFormat[] = "gpipe snapshot";
constexpr std::int64_t kVersion = 1;

// From a snapshot to plain values.

IValue plain(const IValue& value) { return value; }

template <class Item>
IValue plain(const std::vector<Item>& items) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const auto& item : items) list.push_back(plain(item));
  return list;
}

template <class Value>
IValue plain(const std::map<std::string, Value>& items) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [key, value] : items) dict.insert(key, plain(value));
  return dict;
}

IValue plain(const NamedTensors& tensors) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& item : tensors) {
    if (!item.value().defined())
      throw std::runtime_error("tensor '" + item.key() + "' of the model is undefined and cannot be saved");
    dict.insert(item.key(), item.value());
  }
  return dict;
}

/// Whether from_content() can read the value: it contains no dict, and is not nested too deeply.
bool is_option(const IValue& value, int depth = 0) {
  const auto is_part = [depth](const IValue& each) { return is_option(each, depth + 1); };
  if (depth > 16 || value.isGenericDict()) return false;
  if (value.isTuple()) return std::ranges::all_of(value.toTupleRef().elements(), is_part);
  return !value.isList() || std::ranges::all_of(value.toListRef(), is_part);
}

void check_options(const Fields& options) {
  for (const auto& [name, value] : options) {
    if (!is_option(value)) {
      throw std::runtime_error("'" + name + "' of the optimizer contains a dict, or is nested too deeply, and cannot " +
                               "be saved");
    }
  }
}

IValue plain(const OptimizerState& optimizer) {
  std::vector<IValue> groups;
  for (const auto& [name, state] : optimizer.state) check_options(state);
  for (const auto& group : optimizer.param_groups) {
    check_options(group.options);
    auto fields = group.options;
    fields["params"] = plain(group.params);
    groups.push_back(plain(fields));
  }
  return plain(Fields{{"type", optimizer.type}, {"param_groups", plain(groups)}, {"state", plain(optimizer.state)}});
}

// From plain values to a snapshot.

[[noreturn]] void refuse_content(const std::string& what) { throw std::runtime_error("not a snapshot: " + what); }

/// The place of a value in the file, for messages: an entry of a dict, or an item of a list.
struct Where {
  std::string_view key;
  const Where* whole = nullptr;
  bool is_item = false;

  std::string text() const {
    if (is_item) return "an item of " + whole->text();
    return whole == nullptr ? "'" + std::string(key) + "'" : whole->text() + "['" + std::string(key) + "']";
  }
};

[[noreturn]] void wrong(const Plain& found, const Where& where, const char* expected) {
  refuse_content(where.text() + " is of type " + type_of(found) + ", not " + expected);
}

template <class Value>
const Value& get(const Plain& from, const Where& where, const char* expected) {
  const auto* value = std::get_if<Value>(&from.value);
  if (value == nullptr) wrong(from, where, expected);
  return *value;
}

const Plain::Dict& dict(const Plain& from, const Where& where) { return get<Plain::Dict>(from, where, "dict"); }
const Plain::List& list(const Plain& from, const Where& where) { return get<Plain::List>(from, where, "list"); }

void read(const Plain& from, const Where& where, std::int64_t& to) { to = get<std::int64_t>(from, where, "int"); }
void read(const Plain& from, const Where& where, std::string& to) { to = get<std::string>(from, where, "str"); }
void read(const Plain& from, const Where& where, double& to) {
  const auto* whole = std::get_if<std::int64_t>(&from.value);
  to = whole != nullptr ? static_cast<double>(*whole) : get<double>(from, where, "float");
}
/// Reads None as an undefined tensor.
void read(const Plain& from, const Where& where, at::Tensor& to) {
  if (!std::holds_alternative<std::monostate>(from.value)) to = get<at::Tensor>(from, where, "Tensor");
}

void read(const Plain& from, const Where& where, IValue& to) {
  const auto items = [&](const std::vector<Plain>& plains) {
    std::vector<IValue> values;
    for (const auto& each : plains) read(each, {"", &where, true}, values.emplace_back());
    return values;
  };
  to = std::visit(
      [&]<class Value>(const Value& value) -> IValue {
        if constexpr (std::is_same_v<Value, std::monostate>) {
          return {};
        } else if constexpr (std::is_same_v<Value, Plain::Tuple>) {
          return c10::ivalue::Tuple::create(items(value.items));
        } else if constexpr (std::is_same_v<Value, Plain::List>) {
          return plain(items(value));
        } else if constexpr (std::is_same_v<Value, Plain::Dict>) {
          wrong(from, where, "a number, str, Tensor, or a tuple or list of them");
        } else {
          return value;
        }
      },
      from.value);
}

void read(const Plain& from, const Where& where, OptimizerState::Group& to);

template <class Item>
void read(const Plain& from, const Where& where, std::vector<Item>& to) {
  for (const auto& item : list(from, where)) read(item, {"", &where, true}, to.emplace_back());
}

template <class Value>
void read(const Plain& from, const Where& where, std::map<std::string, Value>& to) {
  for (const auto& [key, value] : dict(from, where)) read(value, {key, &where}, to[key]);
}

void read(const Plain& from, const Where& where, NamedTensors& to) {
  for (const auto& [key, value] : dict(from, where)) to.insert(key, get<at::Tensor>(value, {key, &where}, "Tensor"));
}

const Plain& find(const Plain::Dict& dict, const std::string& key, const std::string& where) {
  for (const auto& entry : dict) {
    if (entry.key == key) return entry.value;
  }
  refuse_content(where + " has no '" + key + "'");
}

/// Reads one entry of a dict.
template <class Value>
void read(const Plain& from, const Where& where, const std::string& key, Value& to) {
  read(find(dict(from, where), key, where.text()), {key, &where}, to);
}

void read(const Plain& from, const Where& where, OptimizerState::Group& to) {
  read(from, where, "params", to.params);
  for (const auto& [key, value] : dict(from, where)) {
    if (key != "params") read(value, {key, &where}, to.options[key]);
  }
}

void read(const Plain& from, const Where& where, OptimizerState& to) {
  read(from, where, "type", to.type);
  read(from, where, "param_groups", to.param_groups);
  read(from, where, "state", to.state);
}

}  // namespace

IValue to_content(const Snapshot& snapshot) {
  return plain(Fields{{"format", kFormat},
                      {"version", kVersion},
                      {"model", plain(snapshot.model)},
                      {"optimizer", plain(snapshot.optimizer)},
                      {"epoch", snapshot.epoch},
                      {"position", plain(snapshot.position)},
                      {"random", snapshot.random},
                      {"options", plain(snapshot.options)},
                      {"history", plain(snapshot.history)}});
}

Snapshot from_content(const Plain& content) {
  const auto* values = std::get_if<Plain::Dict>(&content.value);
  if (values == nullptr) refuse_content(std::string("the file contains a ") + type_of(content) + ", not a dict");
  const auto field = [&](const std::string& key, auto& to) { read(find(*values, key, "the file"), {key}, to); };
  std::string format;
  field("format", format);
  if (format != kFormat) refuse_content("its 'format' is '" + format + "', not '" + kFormat + "'");
  std::int64_t version = 0;
  field("version", version);
  if (version > kVersion) {
    throw std::runtime_error("the file has version " + std::to_string(version) +
                             ", but this program reads versions up to " + std::to_string(kVersion) +
                             ": use a newer version of the program");
  }
  Snapshot snapshot;
  field("model", snapshot.model);
  field("optimizer", snapshot.optimizer);
  field("epoch", snapshot.epoch);
  field("position", snapshot.position);
  field("random", snapshot.random);
  field("options", snapshot.options);
  field("history", snapshot.history);
  return snapshot;
}

}  // namespace gpipe
