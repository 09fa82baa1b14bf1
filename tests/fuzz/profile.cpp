#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "balance/cut.h"
#include "balance/predict.h"
#include "balance/profile.h"

namespace {

/// Checks that an accepted profile can be written, cut and used for predictions.
void use(const gpipe::Profile& profile) {
  if (gpipe::profile_from_json(gpipe::profile_to_json(profile)) != profile) std::abort();
  const auto layers = profile.layers.size();
  if (layers > 6) return;
  for (const auto checkpoint : {gpipe::Checkpoint::kNever, gpipe::Checkpoint::kAlways}) {
    const gpipe::RunOptions run{.chunks = 2, .checkpoint = checkpoint};
    try {
      const auto balance = gpipe::balance_by_time(profile, static_cast<int>(std::min<std::size_t>(layers, 2)), run);
      gpipe::balance_by_size(profile, static_cast<int>(balance.size()), run);
      const auto prediction = gpipe::predict(profile, balance, run);
      if (!std::isfinite(prediction.seconds) || prediction.seconds < 0) std::abort();
    } catch (const std::invalid_argument&) {
    }
  }
}

}  // namespace

/// The input is a profile in JSON.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    use(gpipe::profile_from_json({reinterpret_cast<const char*>(data), size}));
  } catch (const std::invalid_argument&) {
  }
  return 0;
}
