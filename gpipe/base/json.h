#pragma once

#include <nlohmann/json.hpp>

#include "gpipe/base/checks.h"

namespace gpipe {

/// Reads JSON of at most so many levels of objects and lists, because later steps recurse. Errors:
/// nlohmann::json::exception; std::invalid_argument for more levels.
inline nlohmann::json parse_json(const std::string& text, int most_levels = 100) {
  return nlohmann::json::parse(text, [=](int depth, auto, auto&) {
    require(depth <= most_levels, "[gpipe] JSON has more than %d levels", most_levels);
    return true;
  });
}

}  // namespace gpipe
