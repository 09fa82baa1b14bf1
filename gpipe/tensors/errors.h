#pragma once

#include <exception>
#include <string>

#include "gpipe/error_info.h"

namespace gpipe {

/// Adds text to what() of an exception of LibTorch or the standard library; the latter's is copied. Returns others as
/// they are.
std::exception_ptr with_context(const std::exception_ptr& error, const std::string& text);

}  // namespace gpipe
