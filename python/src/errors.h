#pragma once

#include <exception>

#include "gpipe/run/pipeline.h"

namespace gpipe::python {

/// LanguageBinding::on_error of a pipeline of Python modules. Adds a note to a Python error that says where it was
/// raised. Throws a Python error with that note in place of any other exception. Called on a worker, without the
/// interpreter's lock.
void on_error(const ErrorInfo& info, const std::exception_ptr& error);

}  // namespace gpipe::python
