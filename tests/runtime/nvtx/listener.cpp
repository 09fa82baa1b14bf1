#include "tests/runtime/nvtx/listener.h"

#include <nvtx3/nvToolsExt.h>

#include <map>
#include <mutex>
#include <thread>

namespace gpipe::nvtx {
namespace {

std::mutex mutex;
std::map<std::thread::id, std::vector<std::string>> open_by_thread;
std::vector<std::string> all;

nvtxDomainHandle_t make_domain(const char* name) {
  static std::string domain;
  domain = name;
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

// As in Nsight Systems, the result tells nothing.
int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto& open = open_by_thread[std::this_thread::get_id()];
  const auto name = *reinterpret_cast<const std::string*>(domain) + ": " + attributes->message.ascii;
  all.push_back(open.empty() ? name : open.back() + " > " + name);
  open.push_back(all.back());
  return -1;
}

int pop(nvtxDomainHandle_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  open_by_thread[std::this_thread::get_id()].pop_back();
  return -1;
}

}  // namespace

std::vector<std::string> ranges() {
  const std::lock_guard<std::mutex> lock(mutex);
  return all;
}

int open_ranges() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::size_t count = 0;
  for (const auto& [thread, open] : open_by_thread) count += open.size();
  return static_cast<int>(count);
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
