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

/// `good` with another value at a place.
Json with(Json good, const std::string& place, const Json& value) {
  good.at(Json::json_pointer(place)) = value;
  return good;
}

class ProfileJson : public ::testing::Test {
 protected:
  static std::string refusal(const std::string& text) {
    return error_of<std::invalid_argument>([&] { profile_from_json(text); });
  }
  std::string refusal(const std::string& place, const Json& value) const {
    return refusal(with(good_, place, value).dump());
  }
  void expect_refused(const std::string& place, const std::vector<Json>& values) const {
    for (const auto& value : values) {
      EXPECT_THAT(refusal(place, value), StartsWith("[gpipe] not a profile: " + place + " is ")) << value;
    }
  }

  const Json good_ = Json::parse(profile_to_json(two_layers()));
};

TEST_F(ProfileJson, RoundTrips) { EXPECT_EQ(profile_from_json(profile_to_json(two_layers())), two_layers()); }

TEST_F(ProfileJson, NamesMayContainAnyBytesAndSecondsMayBeIntegers) {
  auto profile = two_layers();
  profile.layers[0].name = "caf\xe9";
  EXPECT_THAT(profile_from_json(profile_to_json(profile)).layers[0].name, HasSubstr("caf"));
  EXPECT_EQ(profile_from_json(with(good_, "/layers/0/forward", 3).dump()).layers[0].forward, 3);
}

TEST_F(ProfileJson, RefusesTextsThatAreNoProfile) {
  auto lacking = good_;
  lacking["layers"][1].erase("forward");
  const std::pair<std::string, std::string> cases[] = {
      {good_.dump().substr(0, 500), "parse error at"},
      {"", "not a profile: "},
      {"[]", "the text is a list, but must be an object"},
      {lacking.dump(), "/layers/1/forward is missing"},
      {with(good_, "/version", 1).dump(), "/version is 1, but only version 6 is supported"},
      {"{\"" + std::string(10000, 'x') + "\xff\":1}", "not a profile: "},
      {with(good_, "/layers/0/forward", std::string(10000, 'x')).dump(), "/layers/0/forward is "},
      {std::string(1000000, '['), "JSON has more than 100 levels"},
      {std::string(kMaxProfileJson + 1, ' '), "16777217 bytes, but the limit is 16777216"}};
  for (const auto& [text, why] : cases) EXPECT_THAT(refusal(text), AllOf(HasSubstr(why), SizeIs(testing::Lt(300))));
  expect_refused("/version", {4.5, "4", nullptr, std::uint64_t{1} << 32 | 4});
}

TEST_F(ProfileJson, ValuesHaveTheirTypesAndRanges) {
  const auto wraps = (std::int64_t{1} << 32) + 1;
  const Json::array_t wrong_seconds = {-1, -1e-9, 2e9, 1e308, true, "1", nullptr};
  const std::map<std::string, Json::array_t> wrong = {
      {"/device", {1, nullptr}},
      {"/workers", {0.5, 0, -1, wraps}},
      {"/intraop_threads", {0.5, -1, wraps}},
      {"/layers", {"l0", 2, Json::object()}},
      {"/layers/1", {"l0", 2, Json::array()}},
      {"/layers/0/changes_input", {1, "true"}},
      {"/layers/1/shares_with", {0.5, 1.0, true, "1", nullptr, Json::array(), -1, 2, wraps}},
      {"/layers/0/forward", wrong_seconds},
      {"/layers/0/stored", wrong_seconds},
      {"/layers/0/backward", wrong_seconds},
      {"/layers/0/input_gradient", wrong_seconds},
      {"/layers/0/weight_gradient", wrong_seconds},
      {"/blocks/0/layer", {0.5, -1, 2, wraps}},
      {"/blocks/0/born", {"R", "f", 0}},
      {"/blocks/0/until", {"R", ""}},
      {"/blocks/0/freed_by", {0.5, -3, 2, wraps, std::numeric_limits<std::uint64_t>::max()}},
      {"/blocks/0/reaches", {0.5, 0, 3, wraps}},
      {"/blocks/1/readers/0", {0.5, -1, 2, wraps}},
      {"/skips/0/from", {0.5, -1, 2, wraps}},
      {"/skips/0/readers/0", {0.5, -1, 2, wraps}},
      {"/skips/0/changed", {0}},
      {"/ties/0/layers/0", {0.5, -1, 2}},
      {"/ties/0/layers/1", {0.5, 0, 2}},
  };
  for (const auto& [place, values] : wrong) expect_refused(place, values);
  for (const auto* place : {"/layers", "/ties/0/layers"}) {
    EXPECT_THAT(refusal(place, Json::array()), HasSubstr(std::string(place) + " is empty"));
  }
  EXPECT_THAT(refusal(with(with(good_, "/skips/0/from", 1), "/skips/0/readers/0", 0).dump()),
              HasSubstr("/skips/0/readers/0 is 0, but must be from 1 to 1"));
  auto text = good_.dump();
  const std::string seconds = "\"backward\":2.0";
  text.replace(text.find(seconds), seconds.size(), "\"backward\":1e999");
  EXPECT_THAT(refusal(text), HasSubstr("not a profile: "));
}

TEST_F(ProfileJson, BytesAreIntegersInRange) {
  const std::vector<Json> wrong = {
      0.5, -1, 1e30, true, "1", nullptr, (std::int64_t{1} << 53) + 1, std::numeric_limits<std::uint64_t>::max()};
  for (const auto* name :
       {"parameters", "gradients", "late_gradients", "optimizer", "buffers", "output", "saved", "forward_extra",
        "stored_extra", "backward_extra", "first_backward_extra", "input_gradient_extra"}) {
    expect_refused(std::string("/layers/0/") + name, wrong);
  }
  expect_refused("/blocks/0/bytes", wrong);
  expect_refused("/skips/0/bytes", wrong);
  expect_refused("/samples", wrong);
  expect_refused("/samples", {0});
  EXPECT_THAT(refusal("/blocks/0/bytes", std::int64_t{1} << 53),
              HasSubstr("/blocks/0/bytes: the bytes sum to more than"));
}

}  // namespace
}  // namespace gpipe
