// Profiles in JSON.

#include <nlohmann/json.hpp>

#include <limits>

#include "balance/profile.h"
#include "tests/support/matchers.h"

namespace gpipe {
namespace {

using ::testing::SizeIs;
using Json = nlohmann::json;

Profile two_layers() {
  return {.samples = 4,
          .device = "cpu",
          .workers = 2,
          .layers = {{.name = "l0", .forward = 1, .stored = 1e-9, .backward = 2, .parameters = 7},
                     {.name = "l1", .changes_input = true, .shares_with = 0}},
          .blocks = {{.bytes = 10, .born = Kind::B, .layer = 1, .until = Kind::B, .freed_by = 0, .reaches = 1},
                     {.bytes = 20, .until = Kind::F, .freed_by = Block::kNever, .reaches = 2, .readers = {1}}},
          .skips =
              {{.name = "a \"name\"", .from = 0, .readers = {1}, .bytes = 40, .changed = true, .wants_gradient = true}},
          .ties = {{.name = "l0.weight", .layers = {0, 1}, .bytes = 7}}};
}

const Json& good() {
  static const auto json = Json::parse(profile_to_json(two_layers()));
  return json;
}

/// good() with another value at a place.
std::string with(const std::string& place, const Json& value) {
  auto json = good();
  json.at(Json::json_pointer(place)) = value;
  return json.dump();
}

std::string refusal(const std::string& text) {
  return error_of<std::invalid_argument>([&] { profile_from_json(text); });
}

TEST(ProfileJson, RoundTrips) {
  EXPECT_EQ(profile_from_json(profile_to_json(two_layers())), two_layers());
  auto profile = two_layers();
  profile.layers[0].name = "caf\xe9";
  EXPECT_THAT(profile_from_json(profile_to_json(profile)).layers[0].name, HasSubstr("caf"));
  EXPECT_EQ(profile_from_json(with("/layers/0/forward", 3)).layers[0].forward, 3);
}

TEST(ProfileJson, RefusesTextsThatAreNoProfile) {
  auto lacking = good();
  lacking["layers"][1].erase("forward");
  auto overflowing = good().dump();
  const std::string seconds = "\"backward\":2.0";
  overflowing.replace(overflowing.find(seconds), seconds.size(), "\"backward\":1e999");
  const std::pair<std::string, std::string> cases[] = {
      {good().dump().substr(0, 500), "parse error at"},
      {"", "not a profile: "},
      {overflowing, "not a profile: "},
      {"[]", "the text is a list, but must be an object"},
      {lacking.dump(), "/layers/1/forward is missing"},
      {with("/version", 1), "/version is 1, but only version 6 is supported"},
      {"{\"" + std::string(10000, 'x') + "\xff\":1}", "not a profile: "},
      {with("/layers/0/forward", std::string(10000, 'x')), "/layers/0/forward is "},
      {with("/layers", Json::array()), "/layers is empty"},
      {with("/ties/0/layers", Json::array()), "/ties/0/layers is empty"},
      {with("/blocks/0/bytes", std::int64_t{1} << 53), "/blocks/0/bytes: the bytes sum to more than"},
      {std::string(1000000, '['), "JSON has more than 100 levels"},
      {std::string(kMaxProfileJson + 1, ' '), "16777217 bytes, but the limit is 16777216"}};
  for (const auto& [text, why] : cases) EXPECT_THAT(refusal(text), AllOf(HasSubstr(why), SizeIs(testing::Lt(300))));
}

void expect_refused(const std::string& place, const std::vector<Json>& values) {
  for (const auto& value : values) {
    EXPECT_THAT(refusal(with(place, value)), StartsWith("[gpipe] not a profile: " + place + " is ")) << value;
  }
}

TEST(ProfileJson, ValuesHaveTheirTypesAndRanges) {
  const auto wraps = (std::int64_t{1} << 32) + 1;
  const auto huge = std::numeric_limits<std::uint64_t>::max();
  const auto values = good().flatten();
  for (const auto& [place, value] : values.items()) {
    if (value.is_string()) expect_refused(place, {1, nullptr});
    if (value.is_boolean()) expect_refused(place, {1, "true", nullptr});
    if (value.is_number_integer()) expect_refused(place, {0.5, -3, 1e30, true, "1", nullptr, Json::array(), huge});
    if (value.is_number_float()) expect_refused(place, {-1, -1e-9, 2e9, 1e308, true, "1", nullptr});
  }
  const std::map<std::string, Json::array_t> wrong = {
      {"/samples", {0, (std::int64_t{1} << 53) + 1}},
      {"/layers", {"l0", 2, Json::object()}},
      {"/layers/1", {"l0", 2, Json::array()}},
      {"/workers", {0, wraps}},
      {"/layers/1/shares_with", {-1, 2, wraps}},
      {"/blocks/0/layer", {-1, 2, wraps}},
      {"/blocks/0/born", {"R", "f", 0}},
      {"/blocks/0/until", {"R", ""}},
      {"/blocks/0/freed_by", {2, wraps}},
      {"/blocks/0/reaches", {0, 3, wraps}},
      {"/blocks/1/readers/0", {-1, 2, wraps}},
      {"/skips/0/from", {-1, 2, wraps}},
      {"/skips/0/readers/0", {-1, 2, wraps}},
      {"/ties/0/layers/1", {0, 2}},
  };
  for (const auto& [place, of_place] : wrong) expect_refused(place, of_place);
}

}  // namespace
}  // namespace gpipe
