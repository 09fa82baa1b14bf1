#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace gpipe::accelerator {

// When the work of a program would run on a machine with real devices, and how much memory it would take. While a log
// is kept, the checked device notes what each host thread asks of it. replay() then gives every request a time. The
// result depends on what the threads asked, not on when they ran: it is exact, and the same in each run.

/// What a machine takes. Times are in seconds, rates per second. The defaults are round figures of a large GPU.
struct Machine {
  double launch = 6e-6;  ///< of the host, per operator
  double kernel = 2e-6;  ///< of the device, per operator, beside its work
  double memory_rate = 1e12;
  double product_rate = 50e12;  ///< operations of products and convolutions
  double link_rate = 100e9;     ///< bytes between two devices, or between a device and the host
  double link_latency = 5e-6;
  int transfers = 1;       ///< between ranks, that a device can run at once
  std::uint64_t seed = 0;  ///< unless 0, launches take random times
  double scale = 1;        ///< of a tensor's bytes and operations, unless it has only a few numbers
};

/// What an operator asks of a device. A copy between devices uses an engine of each; the host is device -1.
struct Work {
  double bytes = 0;
  double products = 0;
  int copies_from = -2;
  int copies_to = -2;
  std::int64_t transfer = 0;  ///< the number that the ends of a transfer between ranks share; 0: none
  int ends = 2;               ///< of the transfer
  bool is_copy() const { return copies_from != copies_to; }
};

/// One request of a host thread, in the thread's order.
struct Request {
  enum Kind { kLaunch, kRecord, kWait, kSynchronize, kAllocate, kFree };
  Kind kind;
  int stream;                     ///< by index; of kAllocate: the home
  std::int64_t id = 0;            ///< of an event, or of an allocation
  Work work = {};                 ///< of kLaunch; the bytes of kAllocate
  std::vector<int> streams = {};  ///< of kFree: the streams that the allocator was told of
  std::string_view operation = {};
  std::string action = {};
};

/// What was asked, by host thread, and each stream's device.
struct Log {
  std::map<int, std::vector<Request>> threads;
  std::vector<int> devices;
};

/// An operator on its device.
struct DeviceSpan {
  int device;
  bool is_copy;
  double start;
  double end;
  std::string action;  ///< see exchange_action()
};

struct Replay {
  double seconds = 0;       ///< until the last work is over
  double host_seconds = 0;  ///< until the last request is made
  std::vector<DeviceSpan> spans;
  std::map<int, std::int64_t> reserved;  ///< bytes of each device, by the rules of PyTorch's caching allocator
};

/// Runs a log on a machine. A device has one engine for operators and one for copies in each direction. An engine
/// serves first what was ready first. A transfer between ranks follows NCCL's rules: each end begins when the work before
/// it on its stream is over and its device has room, and waits there for the others. Errors: std::logic_error, which
/// lists the transfers that have begun, if something waits for ever.
Replay replay(const Log& log, const Machine& machine);

}  // namespace gpipe::accelerator
