#include "gpipe/checks.h"

#include <stdexcept>
#include <string>

#include "absl/strings/str_join.h"
#include "gpipe/schedule/program.h"

namespace gpipe {

void refuse_argument(const std::string& what) { throw std::invalid_argument("[gpipe] " + what); }

void check_balance(const std::vector<std::int64_t>& balance, std::size_t layers) {
  if (layers == 0) refuse_argument("the model has no layers");
  if (balance.empty()) {
    refuse_argument("balance is empty; give the number of layers of each stage, such as [" + std::to_string(layers) +
                    "] for one stage");
  }
  if (const auto sum = static_cast<std::size_t>(stage_ends(balance).back()); sum != layers) {
    refuse_argument("balance [" + absl::StrJoin(balance, ", ") + "] sums to " + std::to_string(sum) +
                    ", but the model has " + std::to_string(layers) + " layers");
  }
}

void check_chunks(std::int64_t chunks) {
  if (chunks <= 0) refuse_argument("chunks must be positive, but is " + std::to_string(chunks));
}

}  // namespace gpipe
