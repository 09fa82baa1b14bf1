#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>
#include <string>

namespace gpipe::examples {

// Validators for CLI::Option::transform(). Their messages continue the flag's name, as in "--chunks must be at least 1,
// but is 0"; run_program() joins the two.

/// Decimal digits: a whole number from `low` to `high`.
CLI::Validator whole_number(std::uint64_t low, std::uint64_t high);
/// A number from `low` to `high`.
CLI::Validator number_between(double low, double high);
/// A finite number above 0.
CLI::Validator positive_number();
/// A finite number of at least 0.
CLI::Validator non_negative_number();
/// The path of a file or a folder.
CLI::Validator path_name();
/// The size of an image, see to_size().
CLI::Validator image_size_text();

/// Returns the number if the whole text is one, without sign or white space.
std::optional<std::uint64_t> to_whole_number(const std::string& text);
/// Returns the number if the whole text is a finite one, without plus sign or white space.
std::optional<double> to_number(const std::string& text);

/// Writes a number with all its digits, as a flag's value.
std::string to_flag(double value);

/// The upper limit of several flags.
inline constexpr std::int64_t kMaxCount = 1 << 20;

}  // namespace gpipe::examples
