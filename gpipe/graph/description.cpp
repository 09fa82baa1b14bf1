#include "gpipe/graph/description.h"

#include <algorithm>

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

using Json = nlohmann::json;
using Description = Graph::Description;

constexpr std::size_t kMostValues = std::size_t{1} << 20;

c10::OperatorHandle find_operator(const std::string& name) {
  const auto dot = name.find('.', name.find("::"));
  const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto found = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
  if (!found) refuse_argument("the model calls ", name, ", which this version of torch does not have");
  return *found;
}

/// Returns the arguments of an operator: those by position, those by name, and the schema's defaults.
std::vector<Argument> read_arguments(const Json& args, const Json& kwargs, const c10::FunctionSchema& schema) {
  const auto& declared = schema.arguments();
  std::vector<Argument> found;
  std::size_t named = 0;
  for (std::size_t i = 0; i < declared.size(); ++i) {
    const auto& each = declared[i];  // whose type() is int for a dtype, a layout and a memory format
    if (i < args.size()) {
      found.emplace_back(args[i], each.real_type());
    } else if (const auto given = kwargs.find(each.name()); given != kwargs.end()) {
      found.emplace_back(*given, each.real_type());
      ++named;
    } else if (each.default_value()) {
      found.emplace_back(*each.default_value());
    } else {
      refuse_argument("the model calls ", schema.name(), " without its argument '", each.name(), "'");
    }
  }
  if (args.size() > declared.size() || named != kwargs.size()) {
    refuse_argument("the model gives ", schema.name(),
                    " arguments that this version of torch does not know: ", args.dump(), ", ", kwargs.dump());
  }
  return found;
}

Description::Context read_context(const Json& from) {
  Description::Context context{from.value("block", std::int64_t{0})};
  if (from.contains("grad")) {
    context.grad = from["grad"].get<bool>();
    return context;
  }
  context.enabled = from.at("enabled");
  if (const auto& cache = from.at("cache"); !cache.is_null()) context.cache = cache.get<bool>();
  if (const auto& dtype = from.at("autocast"); !dtype.is_null()) {
    context.dtype = Argument({{"dtype", dtype}}, nullptr).evaluate({{}, false, at::kCPU}).toScalarType();
  }
  return context;
}

Description::Call read_call(const Json& from) {
  Description::Call call;
  const auto args = from.value("args", Json::array());
  if (from.contains("operator")) {
    call.name = from["operator"];
    call.target = find_operator(call.name);
    call.is_batch_norm = call.name == "aten::batch_norm";
    call.arguments = read_arguments(args, from.value("kwargs", Json::object()), call.target->schema());
  } else {
    call.name = from.at("python");
    for (const auto& each : args) call.arguments.emplace_back(each, nullptr);
  }
  if (from.contains("result")) call.result = from["result"].get<std::size_t>();
  if (from.contains("mode")) call.mode = from["mode"].get<bool>();
  for (const auto& each : from.value("within", Json::array())) call.within.push_back(read_context(each));
  call.at = from.value("at", "");
  return call;
}

void read_names(const Json& list, std::vector<std::string>& names, std::vector<std::size_t>& values) {
  for (const auto& each : list) {
    names.push_back(each.at(0));
    values.push_back(each.at(1));
  }
}

}  // namespace

Graph::Description::Description(const Json& json) : values(json.at("values")) {
  const auto list = [&](const char* name) { return json.value(name, Json::array()); };
  for (const auto& each : list("inputs")) {
    inputs.push_back(each.is_null() ? std::nullopt : std::optional(each.get<std::size_t>()));
  }
  read_names(list("tensors"), tensors, owned);
  read_names(list("pops"), pops, popped);
  read_names(list("peeks"), peeks, peeked);
  for (const auto& each : list("stashes")) {
    stashes.push_back(each.at(0));
    stashed.emplace_back(each.at(1), nullptr);
  }
  for (const auto& each : list("shapes")) {
    auto& shape = shapes.emplace_back();
    if (each.is_null()) continue;
    shape.emplace();
    for (const auto& size : each) shape->push_back(size.is_null() ? -1 : size.get<std::int64_t>());
  }
  for (const auto& each : list("guards")) guards.push_back({Argument::number(each.at(0)), each.at(1)});
  for (const auto& each : list("calls")) {
    auto& call = calls.emplace_back(read_call(each));
    if (!call.target && call.name != kItem) python_functions.push_back(call.name);
  }
  for (const auto& each : list("outputs")) outputs.emplace_back(each, nullptr);
  if (values > kMostValues || shapes.size() > inputs.size()) {
    refuse_argument("the model's description has ", values, " values, ", shapes.size(), " shapes of ", inputs.size(),
                    " inputs");
  }
  find_last_uses();
}

std::vector<std::size_t> Graph::Description::values_of(const Argument& from) const {
  std::vector<std::size_t> used;
  from.add_values(used);
  for (const auto value : used) {
    if (value >= values) refuse_argument("the model uses value ", value, ", but has ", values);
  }
  return used;
}

void Graph::Description::find_last_uses() {
  std::vector<bool> is_used(values);
  for (const auto* leaving : {&stashed, &outputs}) {
    for (const auto& each : *leaving) {
      for (const auto value : values_of(each)) is_used[value] = true;
    }
  }
  for (const auto& guard : guards) values_of(guard.holds);
  const auto check_value = [&](std::size_t value) {
    if (value >= values) refuse_argument("the model sets value ", value, ", but has ", values);
  };
  for (auto call = calls.rbegin(); call != calls.rend(); ++call) {
    std::vector<std::size_t> of_call;
    for (const auto& each : call->arguments) {
      const auto used = values_of(each);
      of_call.insert(of_call.end(), used.begin(), used.end());
    }
    if (call->result) {
      check_value(*call->result);
      of_call.push_back(*call->result);
    }
    for (const auto value : of_call) {
      if (!is_used[value]) call->last_uses.push_back(value);
      is_used[value] = true;
    }
  }
  const auto free_if_unused = [&](std::size_t value) {
    check_value(value);
    if (!is_used[value]) unused.push_back(value);
  };
  for (const auto* list : {&owned, &popped, &peeked}) std::for_each(list->begin(), list->end(), free_if_unused);
  for (const auto& each : inputs) {
    if (each) free_if_unused(*each);
  }
}

}  // namespace gpipe
