#pragma once

#include <nlohmann/json.hpp>

#include "balance/search.h"

namespace gpipe::examples::balance {

using Json = nlohmann::ordered_json;

inline Json to_json(const Candidate& candidate) {
  return {{"balance", candidate.balance},
          {"chunks", candidate.chunks},
          {"checkpoint", to_string(candidate.checkpoint)},
          {"schedule", candidate.schedule},
          {"placement", candidate.placement},
          {"seconds", candidate.seconds},
          {"bubble", candidate.bubble},
          {"bytes", candidate.bytes},
          {"fits", candidate.fits},
          {"crossing", candidate.crossing},
          {"replicas", candidate.replicas},
          {"reduction", candidate.reduction}};
}

}  // namespace gpipe::examples::balance
