#pragma once

#include <nlohmann/json.hpp>

#include "gpipe/base/checks.h"

namespace gpipe {

inline constexpr int kMostJsonLevels = 100;

/// Reads JSON of at most kMostJsonLevels, as later steps recurse. Errors: nlohmann::json::exception, or
/// std::invalid_argument.
inline nlohmann::json parse_json(const std::string& text) {
  return nlohmann::json::parse(text, [](int depth, auto, auto&) {
    if (depth > kMostJsonLevels) refuse_argument("JSON has more than ", kMostJsonLevels, " levels");
    return true;
  });
}

/// Returns null for a text that parse_json() refuses.
inline nlohmann::json json_or_null(const std::string& text) {
  try {
    return parse_json(text);
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace gpipe
