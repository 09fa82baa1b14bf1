#include "gpipe/error_info.h"

#include <c10/util/Exception.h>

#include "absl/strings/str_cat.h"
#include "gpipe/autograd/stage.h"

namespace gpipe {

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "unknown";
  }
}

ErrorInfo describe(const std::exception_ptr& error, const Action& action, const Stage& stage, int layer) {
  ErrorInfo info{.action = action, .message = message_of(error)};
  if (layer >= 0) {
    info.layer = stage.first_layer + layer;
    info.layer_name = stage.name_of(layer);
  }
  return info;
}

std::string to_string(const ErrorInfo& info) {
  const auto layer = info.layer_name.empty() ? "" : ", layer '" + info.layer_name + "'";
  return absl::StrCat(to_string(info.action), " (stage ", info.action.stage, ", micro-batch ", info.action.micro_batch,
                      layer, ")");
}

}  // namespace gpipe
