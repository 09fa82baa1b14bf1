#include <limits>
#include <type_traits>

#include "absl/strings/str_format.h"
#include "balance/profile.h"
#include "balance/stage_cost.h"
#include "gpipe/base/json.h"

namespace gpipe {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 6;
// Limits far above real profiles. They bound the memory that a hostile text costs, and prevent overflow.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 53;
constexpr double kMostSeconds = 1e9;

// Defines visit(of, f), which calls f(name, member) for each of the members. A name in JSON is the member's.
#define GPIPE_VISIT_MEMBER(member) f(#member, of.member);
#define GPIPE_VISIT(Of, ...)                 \
  template <class T, class F>                \
  requires std::is_same_v<const T, const Of> \
  void visit(T& of, F f) { NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(GPIPE_VISIT_MEMBER, __VA_ARGS__)) }
GPIPE_VISIT(LayerProfile, name, forward, stored, backward, input_gradient, weight_gradient, parameters, gradients,
            late_gradients, optimizer, buffers, output, saved, forward_extra, stored_extra, backward_extra,
            first_backward_extra, input_gradient_extra, changes_input, shares_with)
GPIPE_VISIT(Block, bytes, born, layer, until, freed_by, reaches, readers)
GPIPE_VISIT(SkipProfile, name, from, readers, bytes, changed, wants_gradient)
GPIPE_VISIT(TieProfile, name, layers, bytes)
GPIPE_VISIT(Profile, samples, device, workers, intraop_threads, stage, input_requires_grad, layers, blocks, skips, ties)

template <class Of>
concept Record = requires(Of& of) {
  visit(of, [](const char*, auto&) {});
};

/// Reads values without converting types. `path` is the place of a value in the document, e.g. "/layers/3/forward".
class Reader {
 public:
  Json parse(const std::string& text, std::size_t longest) const {
    if (text.size() > longest) {
      refuse(absl::StrFormat("the text has %d bytes, but the limit is %d", text.size(), longest));
    }
    try {
      return parse_json(text);
    } catch (const std::exception& error) {
      // Drop the text read last: it may be long and contain any bytes.
      const auto reason = reason_of(error.what());
      refuse(reason.substr(0, reason.find("; last read: ")));
    }
  }

  template <class T>
  void read_member(const Json& json, const std::string& path, const char* name, T& value) {
    if (!json.is_object()) refuse_value(json, path, "an object");
    const auto found = json.find(name);
    if (found == json.end()) refuse(absl::StrCat(path, "/", name, " is missing"));
    read(*found, absl::StrCat(path, "/", name), value);
  }

  template <Record Of>
  void read(const Json& json, const std::string& path, Of& of) {
    visit(of, [&](const char* name, auto& member) { read_member(json, path, name, member); });
  }

  template <class T>
  void check_range(const std::string& path, T value, T least, T most) const {
    if (value >= least && value <= most) return;
    refuse(absl::StrCat(path, " is ", value, ", but must be from ", least, " to ", most));
  }

  [[noreturn]] void refuse(const std::string& reason) const { refuse_argument("not a profile: ", reason); }

 private:
  [[noreturn]] void refuse_value(const Json& json, const std::string& path, const std::string& wanted) const {
    const auto found = json.is_object()  ? "an object"
                       : json.is_array() ? "a list"
                                         : json.dump(-1, ' ', /*ensure_ascii=*/true);
    refuse(absl::StrFormat("%s is %.40s, but must be %s", path.empty() ? "the text" : path, found, wanted));
  }

  std::int64_t integer(const Json& json, const std::string& path, std::int64_t least, std::int64_t most) const {
    const bool too_large = json.is_number_unsigned() && json.get<std::uint64_t>() > static_cast<std::uint64_t>(most);
    if (!json.is_number_integer() || too_large || json.get<std::int64_t>() < least) {
      refuse_value(json, path, absl::StrFormat("an integer from %d to %d", least, most));
    }
    return json;
  }

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

/// Refuses a list of layers that is empty or not ascending, or names one outside of first..layers-1.
void check_layers(const Reader& reader, const std::string& path, const std::vector<int>& listed, int first,
                  int layers) {
  if (listed.empty()) reader.refuse(path + " is empty");
  for (std::size_t i = 0; i < listed.size(); ++i) {
    reader.check_range(absl::StrFormat("%s/%d", path, i), listed[i], first, layers - 1);
    first = listed[i] + 1;
  }
}

void check(const Reader& reader, const Profile& profile) {
  const auto layers = static_cast<int>(profile.layers.size());
  if (layers == 0) reader.refuse("/layers is empty");
  constexpr int kMost = std::numeric_limits<int>::max();
  reader.check_range("/samples", profile.samples, std::int64_t{1}, kMostBytes);
  reader.check_range("/workers", profile.workers, 1, kMost);
  reader.check_range("/intraop_threads", profile.intraop_threads, 0, kMost);
  for (int i = 0; i < layers; ++i) {
    reader.check_range(absl::StrFormat("/layers/%d/shares_with", i), profile.layers[i].shares_with, 0, i);
  }
  for (std::size_t i = 0; i < profile.blocks.size(); ++i) {
    const auto& block = profile.blocks[i];
    const auto path = absl::StrFormat("/blocks/%d/", i);
    if (block.born == Kind::W) reader.refuse(path + "born is \"W\", but must be \"F\", \"B\" or \"I\"");
    if (block.until == Kind::I) reader.refuse(path + "until is \"I\", but must be \"F\", \"B\" or \"W\"");
    reader.check_range(path + "layer", block.layer, 0, layers - 1);
    reader.check_range(path + "freed_by", block.freed_by, Block::kNever, layers - 1);
    reader.check_range(path + "reaches", block.reaches, block.layer, layers);
    if (!block.readers.empty()) check_layers(reader, path + "readers", block.readers, 0, layers);
  }
  for (std::size_t i = 0; i < profile.skips.size(); ++i) {
    const auto& skip = profile.skips[i];
    const auto path = absl::StrFormat("/skips/%d/", i);
    reader.check_range(path + "from", skip.from, 0, layers - 1);
    check_layers(reader, path + "readers", skip.readers, skip.from, layers);
  }
  for (std::size_t i = 0; i < profile.ties.size(); ++i) {
    check_layers(reader, absl::StrFormat("/ties/%d/layers", i), profile.ties[i].layers, 0, layers);
  }
}

}  // namespace

// Found by nlohmann::json, so not in a namespace without name.
static void to_json(Json& json, Kind kind) { json = std::string(1, to_char(kind)); }
template <Record Of>
static void to_json(Json& json, const Of& of) {
  visit(of, [&](const char* name, const auto& member) { json[name] = member; });
}

std::string profile_to_json(const Profile& profile) {
  Json json = profile;
  json["version"] = kVersion;
  // Names may contain any bytes.
  return json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

Profile profile_from_json(const std::string& text) {
  Reader reader;
  const auto json = reader.parse(text, kMaxProfileJson);
  int version = 0;
  reader.read_member(json, "", "version", version);
  if (version != kVersion) {
    reader.refuse(absl::StrFormat("/version is %d, but only version %d is supported", version, kVersion));
  }
  Profile profile;
  reader.read(json, "", profile);
  check(reader, profile);
  const StageCost checks_sums(profile);
  return profile;
}

}  // namespace gpipe
