#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "balance/profile.h"
#include "balance/stage_cost.h"

namespace gpipe {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 4;
// Limits far above those of real profiles. They bound the memory that a hostile text costs, and prevent overflow.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 53;
constexpr double kMostSeconds = 1e9;
constexpr int kDepth = 8;

// The JSON name and member of each field.
template <class Of>
constexpr auto kFields = std::tuple();
template <>
constexpr auto kFields<LayerProfile> = std::tuple(
    std::pair("name", &LayerProfile::name), std::pair("forward", &LayerProfile::forward),
    std::pair("stored", &LayerProfile::stored), std::pair("recompute", &LayerProfile::recompute),
    std::pair("backward", &LayerProfile::backward), std::pair("input_gradient", &LayerProfile::input_gradient),
    std::pair("weight_gradient", &LayerProfile::weight_gradient), std::pair("parameters", &LayerProfile::parameters),
    std::pair("gradients", &LayerProfile::gradients), std::pair("late_gradients", &LayerProfile::late_gradients),
    std::pair("optimizer", &LayerProfile::optimizer), std::pair("buffers", &LayerProfile::buffers),
    std::pair("output", &LayerProfile::output), std::pair("saved", &LayerProfile::saved),
    std::pair("forward_extra", &LayerProfile::forward_extra), std::pair("stored_extra", &LayerProfile::stored_extra),
    std::pair("backward_extra", &LayerProfile::backward_extra),
    std::pair("input_gradient_extra", &LayerProfile::input_gradient_extra),
    std::pair("last_backward_extra", &LayerProfile::last_backward_extra),
    std::pair("last_input_gradient_extra", &LayerProfile::last_input_gradient_extra),
    std::pair("changes_input", &LayerProfile::changes_input), std::pair("shares_with", &LayerProfile::shares_with));
template <>
constexpr auto kFields<Block> = std::tuple(std::pair("bytes", &Block::bytes), std::pair("born", &Block::born),
                                           std::pair("layer", &Block::layer), std::pair("until", &Block::until),
                                           std::pair("freed_by", &Block::freed_by),
                                           std::pair("reaches", &Block::reaches),
                                           std::pair("popped_by", &Block::popped_by));
template <>
constexpr auto kFields<SkipProfile> = std::tuple(std::pair("name", &SkipProfile::name),
                                                 std::pair("from", &SkipProfile::from),
                                                 std::pair("to", &SkipProfile::to),
                                                 std::pair("bytes", &SkipProfile::bytes),
                                                 std::pair("changed", &SkipProfile::changed));
template <>
constexpr auto kFields<TieProfile> = std::tuple(std::pair("name", &TieProfile::name),
                                                std::pair("layers", &TieProfile::layers),
                                                std::pair("bytes", &TieProfile::bytes));
template <>
constexpr auto kFields<Profile> = std::tuple(
    std::pair("samples", &Profile::samples), std::pair("device", &Profile::device),
    std::pair("workers", &Profile::workers), std::pair("intraop_threads", &Profile::intraop_threads),
    std::pair("input_requires_grad", &Profile::input_requires_grad), std::pair("layers", &Profile::layers),
    std::pair("blocks", &Profile::blocks), std::pair("skips", &Profile::skips), std::pair("ties", &Profile::ties));

template <class Of>
concept Record = (std::tuple_size_v<decltype(kFields<Of>)> > 0);

template <Record Of>
Json write(const Of& of);

template <class T>
Json write(const T& value) {
  return value;
}

template <class T>
Json write(const std::vector<T>& items) {
  auto json = Json::array();
  for (const auto& item : items) json.push_back(write(item));
  return json;
}

Json write(const Kind& kind) { return std::string(1, to_char(kind)); }

template <Record Of>
Json write(const Of& of) {
  Json json;
  std::apply([&](auto... field) { ((json[field.first] = write(of.*field.second)), ...); }, kFields<Of>);
  return json;
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("[profile] not a profile: " + what); }

[[noreturn]] void refuse_value(const Json& json, const std::string& path, const std::string& wanted) {
  const auto found = json.is_object()  ? "an object"
                     : json.is_array() ? "a list"
                                       : json.dump(-1, ' ', /*ensure_ascii=*/true);
  refuse(absl::StrFormat("%s is %.40s, but must be %s", path.empty() ? "the text" : path, found, wanted));
}

std::int64_t integer(const Json& json, const std::string& path, std::int64_t least, std::int64_t most) {
  const bool too_large = json.is_number_unsigned() && json.get<std::uint64_t>() > static_cast<std::uint64_t>(most);
  if (!json.is_number_integer() || too_large || json.get<std::int64_t>() < least) {
    refuse_value(json, path, absl::StrFormat("an integer from %d to %d", least, most));
  }
  return json;
}

/// Reads values without converting types. `path` is the place of a value in the document, e.g. "/layers/3/forward".
class Reader {
 public:
  template <class T>
  void read_member(const Json& json, const std::string& path, const char* name, T& value) {
    if (!json.is_object()) refuse_value(json, path, "an object");
    const auto found = json.find(name);
    if (found == json.end()) refuse(absl::StrCat(path, "/", name, " is missing"));
    read(*found, absl::StrCat(path, "/", name), value);
  }

  template <Record Of>
  void read(const Json& json, const std::string& path, Of& of) {
    std::apply([&](auto... field) { (read_member(json, path, field.first, of.*field.second), ...); }, kFields<Of>);
  }

 private:
  template <class T>
  void read(const Json& json, const std::string& path, std::vector<T>& items) {
    if (!json.is_array()) refuse_value(json, path, "a list");
    for (const auto& item : json) {
      const auto index = items.size();
      read(item, absl::StrCat(path, "/", index), items.emplace_back());
    }
  }

  void read(const Json& json, const std::string& path, std::string& text) {
    if (!json.is_string()) refuse_value(json, path, "a string");
    text = json;
  }

  void read(const Json& json, const std::string& path, bool& value) {
    if (!json.is_boolean()) refuse_value(json, path, "true or false");
    value = json;
  }

  void read(const Json& json, const std::string& path, Kind& kind) {
    for (const auto each : {Kind::F, Kind::B, Kind::I, Kind::W}) {
      if (json != std::string(1, to_char(each))) continue;
      kind = each;
      return;
    }
    refuse_value(json, path, "\"F\", \"B\", \"I\" or \"W\"");
  }

  /// An index or a count.
  void read(const Json& json, const std::string& path, int& value) {
    value = static_cast<int>(integer(json, path, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
  }

  void read(const Json& json, const std::string& path, std::int64_t& bytes) {
    bytes = integer(json, path, 0, kMostBytes);
    bytes_ += bytes;
    if (bytes_ > kMostBytes) refuse(absl::StrCat(path, ": the bytes sum to more than ", kMostBytes));
  }

  void read(const Json& json, const std::string& path, double& seconds) {
    if (!json.is_number() || !(json >= 0.0 && json <= kMostSeconds)) {
      refuse_value(json, path, absl::StrFormat("a number from 0 to %g", kMostSeconds));
    }
    seconds = json;
  }

  std::int64_t bytes_ = 0;  ///< sum of all sizes read
};

void check_range(const std::string& path, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least || value > most) {
    refuse(absl::StrFormat("%s is %d, but must be from %d to %d", path, value, least, most));
  }
}

void check(const Profile& profile) {
  const auto layers = static_cast<int>(profile.layers.size());
  if (layers == 0) refuse("/layers is empty");
  constexpr int kMost = std::numeric_limits<int>::max();
  check_range("/samples", profile.samples, 1, kMostBytes);
  check_range("/workers", profile.workers, 1, kMost);
  check_range("/intraop_threads", profile.intraop_threads, 0, kMost);
  for (int i = 0; i < layers; ++i) {
    check_range(absl::StrFormat("/layers/%d/shares_with", i), profile.layers[i].shares_with, 0, i);
  }
  for (std::size_t i = 0; i < profile.blocks.size(); ++i) {
    const auto& block = profile.blocks[i];
    const auto path = absl::StrFormat("/blocks/%d/", i);
    if (block.born == Kind::W) refuse(path + "born is \"W\", but must be \"F\", \"B\" or \"I\"");
    if (block.until == Kind::I) refuse(path + "until is \"I\", but must be \"F\", \"B\" or \"W\"");
    check_range(path + "layer", block.layer, 0, layers - 1);
    check_range(path + "freed_by", block.freed_by, HeldBytes::kNeverFreed, layers - 1);
    check_range(path + "reaches", block.reaches, block.layer, layers);
    check_range(path + "popped_by", block.popped_by, -1, layers - 1);
  }
  for (std::size_t i = 0; i < profile.skips.size(); ++i) {
    const auto& skip = profile.skips[i];
    const auto path = absl::StrFormat("/skips/%d/", i);
    check_range(path + "from", skip.from, 0, layers - 1);
    check_range(path + "to", skip.to, skip.from, layers - 1);
  }
  for (std::size_t i = 0; i < profile.ties.size(); ++i) {
    const auto path = absl::StrFormat("/ties/%d/layers", i);
    if (profile.ties[i].layers.empty()) refuse(path + " is empty");
    int least = 0;
    for (std::size_t j = 0; j < profile.ties[i].layers.size(); ++j) {
      const int layer = profile.ties[i].layers[j];
      check_range(absl::StrFormat("%s/%d", path, j), layer, least, layers - 1);
      least = layer + 1;
    }
  }
}

Json parse(const std::string& text) {
  if (text.size() > kMaxProfileJson) {
    refuse(absl::StrFormat("the text has %d bytes, but the limit is %d", text.size(), kMaxProfileJson));
  }
  const auto check_depth = [](int depth, Json::parse_event_t event, const Json&) {
    const bool opens = event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (opens && depth >= kDepth) refuse(absl::StrFormat("the text nests deeper than %d levels", kDepth));
    return true;
  };
  try {
    return Json::parse(text, check_depth);
  } catch (const Json::exception& error) {
    // Drop the text read last: it may be long and contain any bytes.
    const std::string reason = error.what();
    refuse(reason.substr(0, reason.find("; last read: ")));
  }
}

}  // namespace

std::string profile_to_json(const Profile& profile) {
  auto json = write(profile);
  json["version"] = kVersion;
  // Names may contain any bytes.
  return json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

Profile profile_from_json(const std::string& text) {
  const auto json = parse(text);
  Reader reader;
  int version = 0;
  reader.read_member(json, "", "version", version);
  if (version != kVersion)
    refuse(absl::StrFormat("/version is %d, but only version %d is supported", version, kVersion));
  Profile profile;
  reader.read(json, "", profile);
  check(profile);
  const StageCost checks_sums(profile);
  return profile;
}

}  // namespace gpipe
