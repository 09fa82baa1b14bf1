#include "gpipe/snapshot/snapshot.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <exception>
#include <stdexcept>
#include <utility>

#include "gpipe/snapshot/archive.h"

namespace gpipe {
namespace {

using c10::IValue;

constexpr char kFormat[] = "gpipe snapshot";
constexpr std::int64_t kVersion = 1;

// Each kind of value to plain ones ...

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
  for (const auto& item : tensors) dict.insert(item.key(), item.value());
  return dict;
}

IValue plain(const OptimizerState& optimizer) {
  std::vector<IValue> groups;
  for (const auto& group : optimizer.param_groups) {
    auto fields = group.options;
    fields["params"] = plain(group.params);
    groups.push_back(plain(fields));
  }
  return plain(Fields{{"type", optimizer.type}, {"param_groups", plain(groups)}, {"state", plain(optimizer.state)}});
}

// ... and back. Reading IValues of another kind throws, saying which was expected.

void read(const IValue& from, IValue& to) { to = from; }
void read(const IValue& from, std::int64_t& to) { to = from.toInt(); }
void read(const IValue& from, double& to) { to = from.isInt() ? static_cast<double>(from.toInt()) : from.toDouble(); }
void read(const IValue& from, std::string& to) { to = from.toStringRef(); }
void read(const IValue& from, at::Tensor& to) {
  if (!from.isNone()) to = from.toTensor();
}
void read(const IValue& from, OptimizerState& to);
template <class Value>
void read(const IValue& from, std::map<std::string, Value>& to);

template <class Item>
void read(const IValue& from, std::vector<Item>& to) {
  for (const IValue& item : from.toListRef()) read(item, to.emplace_back());
}

template <class Value>
void read(const IValue& from, std::map<std::string, Value>& to) {
  for (const auto& item : from.toGenericDict()) read(item.value(), to[item.key().toStringRef()]);
}

void read(const IValue& from, NamedTensors& to) {
  for (const auto& item : from.toGenericDict()) to.insert(item.key().toStringRef(), item.value().toTensor());
}

template <class Value>
void read(const Fields& fields, const std::string& key, Value& to) {
  const auto found = fields.find(key);
  if (found == fields.end()) throw std::runtime_error("it is no snapshot: it has no '" + key + "'");
  try {
    read(found->second, to);
  } catch (const c10::Error& error) {
    throw std::runtime_error("it is no snapshot: '" + key + "' is something else: " + error.what_without_backtrace());
  }
}

void read(const IValue& from, OptimizerState& to) {
  Fields fields;
  read(from, fields);
  read(fields, "type", to.type);
  read(fields, "state", to.state);
  std::vector<Fields> groups;
  read(fields, "param_groups", groups);
  for (auto& group : groups) {
    auto& added = to.param_groups.emplace_back();
    read(group, "params", added.params);
    group.erase("params");
    added.options = std::move(group);
  }
}

bool is_snapshot(const IValue& value) {
  if (!value.isGenericDict()) return false;
  const auto dict = value.toGenericDict();
  const auto format = dict.find("format");
  return format != dict.end() && format->value().isString() && format->value().toStringRef() == kFormat;
}

Snapshot parse(const IValue& value) {
  if (!is_snapshot(value)) throw std::runtime_error("it is no snapshot, but something else that torch saved");
  Fields fields;
  read(value, fields);
  std::int64_t version = 0;
  read(fields, "version", version);
  if (version > kVersion) {
    throw std::runtime_error("its version is " + std::to_string(version) + ", and this program reads up to " +
                             std::to_string(kVersion) + ": read it with a newer one");
  }
  Snapshot snapshot;
  read(fields, "model", snapshot.model);
  read(fields, "optimizer", snapshot.optimizer);
  read(fields, "epoch", snapshot.epoch);
  read(fields, "position", snapshot.position);
  read(fields, "random", snapshot.random);
  read(fields, "options", snapshot.options);
  read(fields, "history", snapshot.history);
  return snapshot;
}

}  // namespace

void write_snapshot(const std::filesystem::path& path, const Snapshot& snapshot) {
  write_archive(path, plain(Fields{{"format", kFormat},
                                   {"version", kVersion},
                                   {"model", plain(snapshot.model)},
                                   {"optimizer", plain(snapshot.optimizer)},
                                   {"epoch", snapshot.epoch},
                                   {"position", plain(snapshot.position)},
                                   {"random", snapshot.random},
                                   {"options", plain(snapshot.options)},
                                   {"history", plain(snapshot.history)}}));
}

Snapshot read_snapshot(const std::filesystem::path& path) {
  try {
    return parse(read_archive(path));
  } catch (const std::exception& error) {
    throw std::runtime_error("cannot read '" + path.string() + "': " + error.what());
  }
}

}  // namespace gpipe
