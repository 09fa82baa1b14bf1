#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "gpipe/ranks/network.h"

namespace gpipe {

/// A store that is not used any more when the process that serves it has ended: c10d then prints a warning with a backtrace
/// for each use. Notices the end of a TCPStore's process before a use, and of any other store by the first use that fails.
///
/// Thread safety: that of the store. Errors: std::runtime_error after the end.
class WatchedStore : public c10d::PrefixStore {
 public:
  WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store);

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool check(const std::vector<std::string>& keys) override;

 private:
  struct Watch {
    std::unique_ptr<const Probe> probe;  // null for other stores
    std::atomic<bool> ended = false;
  };
  WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Watch> watch);

  template <typename Use>
  auto use(Use use);

  const std::shared_ptr<Watch> watch_;  // shared with clones
};

}  // namespace gpipe
