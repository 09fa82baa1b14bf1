#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "balance/cluster.h"

namespace gpipe {
namespace {

constexpr double kMostClusterBytes = std::int64_t{1} << 53;
constexpr double kMostLatency = 1e3;

[[noreturn]] void refuse_cluster(const std::string& what) {
  throw std::invalid_argument("[cluster] not a cluster: " + what);
}

[[noreturn]] void refuse_member(const nlohmann::json& json, const std::string& path, const std::string& wanted) {
  const auto found = json.is_object()  ? "an object"
                     : json.is_array() ? "a list"
                                       : json.dump(-1, ' ', /*ensure_ascii=*/true);
  refuse_cluster(absl::StrFormat("%s is %.40s, but must be %s", path.empty() ? "the text" : path, found, wanted));
}

/// The members of an object, which has exactly these names.
class Members {
 public:
  Members(const nlohmann::json& json, std::string path, std::initializer_list<const char*> names)
      : json_(json), path_(std::move(path)) {
    if (!json.is_object()) refuse_member(json, path_, "an object");
    for (const char* name : names) {
      if (!json.contains(name)) refuse_cluster(absl::StrCat(path_, "/", name, " is missing"));
    }
    for (const auto& [key, value] : json.items()) {
      if (std::find(names.begin(), names.end(), key) != names.end()) continue;
      refuse_cluster(absl::StrFormat("%s/%.40s is unknown", path_, key));
    }
  }

  std::int64_t integer(const char* name, std::int64_t least, std::int64_t most) const {
    const auto& value = json_.at(name);
    if (!value.is_number_integer() || value < least || value > most) {
      refuse_member(value, place(name), absl::StrFormat("an integer from %d to %d", least, most));
    }
    return value;
  }

  double number(const char* name, double least, double most) const {
    const auto& value = json_.at(name);
    if (!value.is_number() || !(value >= least && value <= most)) {
      refuse_member(value, place(name), absl::StrFormat("a number from %g to %g", least, most));
    }
    return value;
  }

  LinkSpeed link(const char* name) const {
    const Members members(json_.at(name), place(name), {"bandwidth", "latency"});
    return {members.number("bandwidth", 1, kMostClusterBytes), members.number("latency", 0, kMostLatency)};
  }

 private:
  std::string place(const char* name) const { return absl::StrCat(path_, "/", name); }

  const nlohmann::json& json_;
  const std::string path_;
};

nlohmann::json parse_cluster(const std::string& text) {
  if (text.size() > kMaxClusterJson) {
    refuse_cluster(absl::StrFormat("the text has %d bytes, but the limit is %d", text.size(), kMaxClusterJson));
  }
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    // Drop the text read last: it may be long and contain any bytes.
    const std::string reason = error.what();
    refuse_cluster(reason.substr(0, reason.find("; last read: ")));
  }
}

}  // namespace

Cluster cluster_from_json(const std::string& text) {
  const auto json = parse_cluster(text);
  const Members members(json, "", {"hosts", "devices_per_host", "memory", "inside", "between"});
  const auto hosts = members.integer("hosts", 1, kMostDevices);
  return {static_cast<int>(hosts), static_cast<int>(members.integer("devices_per_host", 1, kMostDevices / hosts)),
          members.integer("memory", 0, static_cast<std::int64_t>(kMostClusterBytes)), members.link("inside"),
          members.link("between")};
}

}  // namespace gpipe
