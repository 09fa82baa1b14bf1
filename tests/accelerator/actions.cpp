#include "tests/accelerator/actions.h"

#include <cctype>
#include <memory>
#include <string>

#include "tests/accelerator/stream_order.h"

namespace gpipe::accelerator {
namespace {

struct Context : at::ObserverContext {
  explicit Context(std::string action) : scope(std::move(action)) {}
  ActionScope scope;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& range) {
  const std::string name = range.name();
  const std::string prefix = "gpipe ";
  const bool is_action = name.rfind(prefix, 0) == 0 && std::isdigit(name[prefix.size()]);
  return is_action ? std::make_unique<Context>(name.substr(prefix.size())) : nullptr;
}

}  // namespace

ActionListener::ActionListener()
    : handle_(at::addGlobalCallback(at::RecordFunctionCallback(begin).scopes({at::RecordScope::USER_SCOPE}))) {}

ActionListener::~ActionListener() { at::removeCallback(handle_); }

}  // namespace gpipe::accelerator
