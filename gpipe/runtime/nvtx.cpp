#include "gpipe/runtime/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace gpipe {

bool nvtx_listens() {
  static const bool listens = [] {
    if (nvtxRangePushA("gpipe") < 0) return false;  // no tool
    nvtxRangePop();
    return true;
  }();
  return listens;
}

void nvtx_push(const std::string& name) { nvtxRangePushA(name.c_str()); }

void nvtx_pop() { nvtxRangePop(); }

}  // namespace gpipe
