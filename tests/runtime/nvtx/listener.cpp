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

int push(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto& open = open_by_thread[std::this_thread::get_id()];
  all.push_back(open.empty() ? name : open.back() + " > " + name);
  open.push_back(all.back());
  return static_cast<int>(open.size()) - 1;
}

int pop() {
  const std::lock_guard<std::mutex> lock(mutex);
  auto& open = open_by_thread[std::this_thread::get_id()];
  open.pop_back();
  return static_cast<int>(open.size());
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
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(gpipe::nvtx::push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(gpipe::nvtx::pop);
  return 1;
}
