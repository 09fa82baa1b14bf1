#pragma once

#include <exception>
#include <functional>

#include "absl/functional/function_ref.h"

namespace gpipe {

/// Runs `wait` on another thread and calls `poll` on this one every 50 ms meanwhile. After an exception of `poll`, calls
/// `on_stop`, which must make `wait` end soon, and throws that exception at the end. Without `poll`, runs `wait` here.
void while_polling(const std::function<void()>& poll, absl::FunctionRef<void()> wait,
                   absl::FunctionRef<void(const std::exception&)> on_stop);

}  // namespace gpipe
