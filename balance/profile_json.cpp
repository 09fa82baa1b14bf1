// Errors name the place in the document.
#define JSON_DIAGNOSTICS 1

#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "absl/strings/str_format.h"
#include "balance/profile.h"

namespace gpipe {
namespace {

constexpr int kVersion = 1;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("[profile] not a profile: " + what); }

void check_not_negative(double value, const std::string& name, const std::string& what) {
  if (value >= 0 && std::isfinite(value)) return;
  refuse(absl::StrFormat("%s of layer '%s' is %g, but must be finite and not negative", what, name, value));
}

void check(const Profile& profile) {
  const int layers = static_cast<int>(profile.layers.size());
  if (layers == 0) refuse("it has no layers");
  if (profile.samples < 1 || profile.workers < 1) refuse("samples and workers must be positive");
  for (int i = 0; i < layers; ++i) {
    const auto& layer = profile.layers[i];
    if (layer.shares_with < 0 || layer.shares_with > i) {
      refuse(absl::StrFormat("layer %d shares with layer %d", i, layer.shares_with));
    }
    check_not_negative(layer.forward, layer.name, "forward");
    check_not_negative(layer.stored, layer.name, "stored");
    check_not_negative(layer.recompute, layer.name, "recompute");
    check_not_negative(layer.backward, layer.name, "backward");
    for (const auto bytes :
         {layer.parameters, layer.gradients, layer.late_gradients, layer.optimizer, layer.buffers, layer.output,
          layer.saved, layer.forward_extra, layer.stored_extra, layer.backward_extra}) {
      check_not_negative(static_cast<double>(bytes), layer.name, "a number of bytes");
    }
  }
  for (const auto& block : profile.blocks) {
    const bool possible = block.bytes >= 0 && block.layer >= 0 && block.layer < layers &&
                          (block.born == Kind::F || block.born == Kind::B) &&
                          (block.until == Kind::F || block.until == Kind::B) && block.freed_by >= Held::kForEver &&
                          block.freed_by < layers && block.reaches >= block.layer && block.reaches <= layers &&
                          block.popped_by >= -1 && block.popped_by < layers;
    if (!possible) refuse(absl::StrFormat("a block of layer %d cannot be", block.layer));
  }
  for (const auto& skip : profile.skips) {
    if (skip.from < 0 || skip.to < skip.from || skip.to >= layers || skip.bytes < 0) {
      refuse(
          absl::StrFormat("skip '%s' from layer %d to layer %d of %d layers", skip.name, skip.from, skip.to, layers));
    }
  }
}

}  // namespace

NLOHMANN_JSON_SERIALIZE_ENUM(Kind, {{Kind::R, nullptr}, {Kind::F, "F"}, {Kind::B, "B"}})
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LayerProfile, name, forward, stored, recompute, backward, parameters, gradients,
                                   late_gradients, optimizer, buffers, output, saved, forward_extra, stored_extra,
                                   backward_extra, changes_input, shares_with)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Block, bytes, born, layer, until, freed_by, reaches, popped_by)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SkipProfile, name, from, to, bytes, changed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Profile, samples, device, workers, intraop_threads, layers, blocks, skips)

std::string profile_to_json(const Profile& profile) {
  nlohmann::json json = profile;
  json["version"] = kVersion;
  // Names may be any bytes.
  return json.dump(1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
}

Profile profile_from_json(const std::string& text) {
  Profile profile;
  try {
    const auto json = nlohmann::json::parse(text);
    const int version = json.at("version");
    if (version != kVersion) refuse(absl::StrFormat("its version is %d, and %d is known", version, kVersion));
    profile = json;
  } catch (const nlohmann::json::exception& error) {
    refuse(error.what());
  }
  check(profile);
  return profile;
}

}  // namespace gpipe
