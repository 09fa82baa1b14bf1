#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Checks of GPipe's arguments. Bindings call them before they change a model.

namespace gpipe {

/// Throws std::invalid_argument with "[gpipe] " before `what`.
[[noreturn]] void refuse_argument(const std::string& what);

/// Errors: std::invalid_argument for a model without layers, or a balance that is not positive or does not sum to the
/// number of layers.
void check_balance(const std::vector<std::int64_t>& balance, std::size_t layers);

/// Errors: std::invalid_argument unless `chunks` is positive.
void check_chunks(std::int64_t chunks);

}  // namespace gpipe
