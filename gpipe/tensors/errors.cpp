#include "gpipe/tensors/errors.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <typeinfo>

#include "absl/strings/str_cat.h"

namespace gpipe {
namespace {

// Returns an exception of the same type as `error`, if that is one of Types, whose what() has the text too.
template <typename... Types>
std::exception_ptr copy_with(const std::exception& error, const std::string& text) {
  const auto what = absl::StrCat(error.what(), " (", text, ")");
  std::exception_ptr made;
  static_cast<void>(((typeid(error) == typeid(Types) && (made = std::make_exception_ptr(Types(what)))) || ...));
  return made;
}

}  // namespace

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& exception) {
    const std::string text = exception.what();
    return text.substr(0, text.find("\n\nAt:\n"));  // pybind11 appends a traceback
  } catch (...) {
    return "unknown";
  }
}

std::string to_string(const ErrorInfo& info) {
  const auto layer = info.layer_name.empty() ? "" : ", layer '" + info.layer_name + "'";
  return absl::StrCat(to_string(info.action), " (stage ", info.action.stage, ", micro-batch ", info.action.micro_batch,
                      layer, ")");
}

std::exception_ptr with_context(const std::exception_ptr& error, const std::string& text) {
  std::exception_ptr made;
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& exception) {
    exception.add_context(text);
  } catch (const std::exception& exception) {
    made = copy_with<std::runtime_error, std::range_error, std::overflow_error, std::underflow_error, std::logic_error,
                     std::invalid_argument, std::domain_error, std::length_error, std::out_of_range>(exception, text);
  } catch (...) {
  }
  return made ? made : error;
}

}  // namespace gpipe
