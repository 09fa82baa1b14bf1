#pragma once

#include <nlohmann/json.hpp>

#include "gpipe/base/checks.h"

namespace gpipe {

/// Reads JSON of limited depth, as later steps recurse. Errors: nlohmann::json::exception, or std::invalid_argument.
inline nlohmann::json parse_json(const std::string& text, int most_levels = 100) {
  return nlohmann::json::parse(text, [=](int depth, auto, auto&) {
    require(depth <= most_levels, "[gpipe] JSON has more than %d levels", most_levels);
    return true;
  });
}

}  // namespace gpipe
