#include "gpipe/autograd/checkpointing.h"

#include <utility>

namespace gpipe {
namespace {

thread_local PassScope::Pass pass_of_this_thread = PassScope::Pass::kPlain;

}  // namespace

bool is_checkpointing() { return pass_of_this_thread == PassScope::Pass::kCheckpointing; }

bool is_recomputing() { return pass_of_this_thread == PassScope::Pass::kRecomputing; }

PassScope::PassScope(Pass pass) : before_(std::exchange(pass_of_this_thread, pass)) {}

PassScope::~PassScope() { pass_of_this_thread = before_; }

}  // namespace gpipe
