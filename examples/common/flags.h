#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>
#include <string>

namespace gpipe::examples {

// Validators for CLI::Option::transform(). What they refuse, they refuse in one line that gives the value and says what
// is allowed. What they let pass, CLI11 converts.

/// Decimal digits: a whole number from `low` to `high`.
CLI::Validator whole_number(std::uint64_t low, std::uint64_t high);
/// A number from `low` to `high`.
CLI::Validator number_between(double low, double high);
/// A finite number above 0.
CLI::Validator positive_number();
/// A finite number of at least 0.
CLI::Validator non_negative_number();
/// The path of a file or a directory.
CLI::Validator path_name();
/// The size of an image, see to_size().
CLI::Validator image_size_text();

/// The number, if the whole text is one; without sign and white space.
std::optional<std::uint64_t> to_whole_number(const std::string& text);
/// The number, if the whole text is one; it may be infinite or not a number.
std::optional<double> to_number(const std::string& text);

/// A number as the command line would have it, with all its digits.
std::string to_flag(double value);

/// The largest of several flags: what a program can count to is more than anybody needs.
inline constexpr std::int64_t kMaxCount = 1 << 20;

}  // namespace gpipe::examples
