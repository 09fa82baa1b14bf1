#include "gpipe/runtime/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace gpipe {
namespace {

// Null unless a tool listens.
nvtxDomainHandle_t domain() {
  static const auto made = nvtxDomainCreateA("gpipe");
  return made;
}

}  // namespace

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

}  // namespace gpipe
