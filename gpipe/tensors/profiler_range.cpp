#include "gpipe/tensors/profiler_range.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

namespace gpipe {
namespace {

#ifdef NVTX_VERSION
// Null unless a tool listens.
nvtxDomainHandle_t domain() {
  static const auto made = nvtxDomainCreateA("gpipe");
  return made;
}

bool nvtx_listens() { return domain() != nullptr; }

void nvtx_push(const std::string& name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name.c_str();
  nvtxDomainRangePushEx(domain(), &attributes);
}

void nvtx_pop() { nvtxDomainRangePop(domain()); }
#else
bool nvtx_listens() { return false; }
void nvtx_push(const std::string&) {}
void nvtx_pop() {}
#endif

}  // namespace

ProfilerRange::ProfilerRange(absl::FunctionRef<std::string()> name)
    : range_(at::RecordScope::USER_SCOPE), nvtx_(nvtx_listens()) {
  if (!range_.isActive() && !nvtx_) return;
  const auto text = name();
  if (range_.isActive()) range_.before(text);
  if (nvtx_) nvtx_push(text);
}

ProfilerRange::~ProfilerRange() {
  if (nvtx_) nvtx_pop();
}

}  // namespace gpipe
