#include "gpipe/ranks/nccl.h"

#include <dlfcn.h>

#include <string>

#include "gpipe/base/checks.h"

namespace gpipe {

// The code is in a library of its own, beside this one, because it needs libraries that a torch without CUDA lacks.
std::unique_ptr<DeviceConnections> connect_by_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                                   std::chrono::milliseconds limit) {
  using Connect = DeviceConnections*(const c10::intrusive_ptr<c10d::Store>&, std::chrono::milliseconds);
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&connect_by_nccl), &here);
  const std::string path(here.dli_fname);
  void* library = dlopen((path.substr(0, path.rfind('/') + 1) + "libgpipe_nccl.so").c_str(), RTLD_NOW);
  auto* connect = library == nullptr ? nullptr : dlsym(library, "gpipe_connect_by_nccl");
  if (connect == nullptr) {
    refuse_argument("nccl is set, but this gpipe was built without NCCL, or this torch has no CUDA (" +
                    std::string(dlerror()) + "); build gpipe with a torch that has CUDA, or leave nccl out");
  }
  return std::unique_ptr<DeviceConnections>(reinterpret_cast<Connect*>(connect)(store, limit));
}

}  // namespace gpipe
