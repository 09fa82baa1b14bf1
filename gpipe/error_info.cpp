#include "gpipe/error_info.h"

namespace gpipe {

ErrorInfo describe(const std::exception_ptr& error, const Action& action, const Stage& stage, int layer) {
  ErrorInfo info;
  info.action = action;
  if (layer >= 0) {
    info.layer = stage.first_layer + layer;
    info.layer_name = stage.name_of(layer);
  }
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    info.message = exception.what();
  } catch (...) {
    info.message = "unknown";
  }
  return info;
}

}  // namespace gpipe
