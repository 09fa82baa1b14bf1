#include "examples/common/flags.h"

#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <system_error>

#include "examples/common/image.h"

namespace gpipe::examples {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class Number>
std::optional<Number> parse(const std::string& text) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

CLI::Validator number_where(const std::function<bool(double)>& allowed, const std::string& range,
                            const std::string& what) {
  return {[=](std::string& text) {
            const auto value = to_number(text);
            return value && allowed(*value) ? "" : "'" + text + "' is not a " + what;
          },
          range};
}

}  // namespace

CLI::Validator whole_number(std::uint64_t low, std::uint64_t high) {
  const auto range = std::to_string(low) + " to " + std::to_string(high);
  return {[=](std::string& text) -> std::string {
            const auto value = to_whole_number(text);
            if (!value || *value < low || *value > high) return "'" + text + "' is not a whole number from " + range;
            text = std::to_string(*value);  // CLI11 takes 010 for 8
            return "";
          },
          range};
}

CLI::Validator number_between(double low, double high) {
  const auto range = to_flag(low) + " to " + to_flag(high);
  return number_where([=](double value) { return value >= low && value <= high; }, range,
                      "number from " + to_flag(low) + " to " + to_flag(high));
}

CLI::Validator positive_number() {
  return number_where([](double value) { return value > 0 && value < kInfinity; }, "above 0", "finite number above 0");
}

CLI::Validator non_negative_number() {
  return number_where([](double value) { return value >= 0 && value < kInfinity; }, "at least 0",
                      "finite number of at least 0");
}

CLI::Validator path_name() {
  return {[](std::string& text) { return text.empty() ? "'' is not a path" : ""; }, ""};
}

CLI::Validator image_size_text() {
  return {[](std::string& text) -> std::string {
            try {
              to_size(text);
              return "";
            } catch (const std::invalid_argument& error) {
              return error.what();
            }
          },
          ""};
}

std::optional<std::uint64_t> to_whole_number(const std::string& text) { return parse<std::uint64_t>(text); }

std::optional<double> to_number(const std::string& text) { return parse<double>(text); }

std::string to_flag(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

}  // namespace gpipe::examples
