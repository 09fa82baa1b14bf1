#include "gpipe/runtime/nvtx.h"

namespace gpipe {

bool nvtx_listens() { return false; }
void nvtx_push(const std::string&) {}
void nvtx_pop() {}

}  // namespace gpipe
