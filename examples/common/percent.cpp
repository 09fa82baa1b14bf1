#include "examples/common/percent.h"

#include <cmath>
#include <ostream>
#include <utility>

#include "absl/strings/str_format.h"

namespace gpipe::examples {

Percent::Percent(std::ostream& out, bool terminal, std::string label)
    : out_(out), terminal_(terminal), label_(std::move(label)) {
  show(0);
}

Percent::~Percent() {
  if (terminal_) out_ << "\r\033[K" << std::flush;
}

void Percent::show(double part) {
  const int percent = static_cast<int>(std::floor(100 * part));
  if (!terminal_ || percent == shown_) return;
  shown_ = percent;
  constexpr int kWidth = 24;
  const int filled = percent * kWidth / 100;
  out_ << absl::StrFormat("\r%s [%s%s] %3d %%", label_, std::string(filled, '#'), std::string(kWidth - filled, '.'),
                          percent)
       << std::flush;
}

}  // namespace gpipe::examples
