// A tool that records NVTX ranges. NVTX loads this library if NVTX_INJECTION64_PATH has its path.
#include <nvtx3/nvToolsExt.h>

#include <mutex>
#include <string>
#include <vector>

namespace gpipe::nvtx {
namespace {

std::mutex mutex;
std::vector<std::string> ended;
thread_local std::vector<std::string> open;

nvtxDomainHandle_t make_domain(const char* name) {
  static std::string domain;
  domain = name;
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

// As in Nsight Systems, the result tells nothing.
int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  const auto name = *reinterpret_cast<const std::string*>(domain) + ": " + attributes->message.ascii;
  open.push_back(open.empty() ? name : open.back() + " > " + name);
  return -1;
}

int pop(nvtxDomainHandle_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  ended.push_back(open.back());
  open.pop_back();
  return -1;
}

}  // namespace

/// Returns the ranges that have ended, as "domain: name", each after those around it: "outer > inner". Thread-safe.
std::vector<std::string> ended_ranges() {
  const std::lock_guard<std::mutex> lock(mutex);
  return ended;
}

}  // namespace gpipe::nvtx

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(gpipe::nvtx::make_domain);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(gpipe::nvtx::push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(gpipe::nvtx::pop);
  return 1;
}
