// The torch wheel has no headers of Gloo, and CMake makes empty ones. So this declares the types that the header of c10d
// names. It uses only pointers to them, and overrides the functions of Store.
#include <chrono>
#include <string>
#include <vector>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class Device;
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};
}  // namespace transport

namespace rendezvous {
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace rendezvous

}  // namespace gloo

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "gpipe/ranks/device_wire.h"

namespace gpipe {

c10::intrusive_ptr<c10d::Backend> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  const std::string& host, std::chrono::milliseconds limit) {
  const auto options = c10d::ProcessGroupGloo::Options::create(limit);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(host));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

}  // namespace gpipe
