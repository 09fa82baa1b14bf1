#include "examples/common/flags.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <system_error>

#include "examples/common/image.h"

namespace gpipe::examples {
namespace {

template <class Number>
std::optional<Number> parse(const std::string& text) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

std::string refusal(const std::string& requirement, const std::string& text) {
  return "must be " + requirement + ", but is " + text;
}

std::string in_quotes(const std::string& text) { return "'" + text + "'"; }

bool is_integer(const std::string& text) {
  const std::size_t sign = text.starts_with('-') ? 1 : 0;
  return text.size() > sign && text.find_first_not_of("0123456789", sign) == std::string::npos;
}

// `check` returns the requirement that a finite number misses, or an empty string.
CLI::Validator number_where(const std::function<std::string(double)>& check, const std::string& range) {
  return {[=](std::string& text) -> std::string {
            const auto value = to_number(text);
            if (!value) return refusal("a finite number", in_quotes(text));
            const auto requirement = check(*value);
            return requirement.empty() ? "" : refusal(requirement, text);
          },
          range};
}

}  // namespace

CLI::Validator whole_number(std::uint64_t low, std::uint64_t high) {
  return {[=](std::string& text) -> std::string {
            if (!is_integer(text)) return refusal("a whole number", in_quotes(text));
            const auto value = to_whole_number(text);
            const bool too_low = text.starts_with('-') || (value && *value < low);
            if (too_low) return refusal("at least " + std::to_string(low), text);
            if (!value || *value > high) return refusal("at most " + std::to_string(high), text);
            text = std::to_string(*value);  // CLI11 would read 010 as octal
            return "";
          },
          std::to_string(low) + " to " + std::to_string(high)};
}

CLI::Validator number_between(double low, double high) {
  const auto check = [=](double value) -> std::string {
    if (value < low) return "at least " + to_flag(low);
    return value > high ? "at most " + to_flag(high) : "";
  };
  return number_where(check, to_flag(low) + " to " + to_flag(high));
}

CLI::Validator positive_number() {
  return number_where([](double value) { return value > 0 ? "" : "above 0"; }, "above 0");
}

CLI::Validator non_negative_number() {
  return number_where([](double value) { return value >= 0 ? "" : "at least 0"; }, "at least 0");
}

CLI::Validator path_name() {
  return {[](std::string& text) { return text.empty() ? refusal("a path", in_quotes(text)) : ""; }, ""};
}

CLI::Validator image_size_text() {
  return {[](std::string& text) -> std::string {
            try {
              to_size(text);
              return "";
            } catch (const std::invalid_argument&) {
              return refusal("a size such as 192x128", in_quotes(text));
            }
          },
          ""};
}

std::optional<std::uint64_t> to_whole_number(const std::string& text) { return parse<std::uint64_t>(text); }

std::optional<double> to_number(const std::string& text) {
  const auto value = parse<double>(text);
  return value && std::isfinite(*value) ? value : std::nullopt;
}

std::string to_flag(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

}  // namespace gpipe::examples
