#include "gpipe/ranks/socket.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <set>

#include "gpipe/base/checks.h"
#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

/// The sockets of this process.
class Registry {
 public:
  // Never destroyed, because the handlers of forks use it.
  static Registry& get() {
    static auto* const registry = new Registry;
    return *registry;
  }

  int add(absl::FunctionRef<int()> make) {
    MutexLock lock(mutex_);
    const int made = make();
    if (made >= 0) open_.insert(made);
    return made;
  }
  void remove(int descriptor) {
    MutexLock lock(mutex_);
    if (open_.erase(descriptor) != 0) close(descriptor);
  }

 private:
  Registry() {
    pthread_atfork([] { get().lock(); }, [] { get().unlock(); }, [] { get().close_all(); });
  }
  void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_.lock(); }
  void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_.unlock(); }
  void close_all() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (const int descriptor : open_) close(descriptor);
    open_.clear();
    mutex_.unlock();
  }

  Mutex mutex_;
  std::set<int> open_ ABSL_GUARDED_BY(mutex_);
};

// The address without its port, as numbers; empty for one that is not of IP.
std::string numbers_of(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST];
  return getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

// Lets a socket listen. Returns whether it does.
bool listen_with(int descriptor, const addrinfo& address) {
  const int on = 1;
  return setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
         bind(descriptor, address.ai_addr, address.ai_addrlen) == 0 && listen(descriptor, SOMAXCONN) == 0;
}

// Returns the first socket for an address of the host that `use` accepts, which the caller owns; -1 if there is none.
int first_socket(const std::string& host, int port, int type, absl::FunctionRef<bool(int, const addrinfo&)> use) {
  addrinfo hints = {};
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0) {
    throw_error("the address of the host '", host, "' is not known: ", gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  for (const auto* address = found; address != nullptr; address = address->ai_next) {
    const int made = socket(address->ai_family, type | SOCK_CLOEXEC, address->ai_protocol);
    if (made >= 0 && use(made, *address)) return made;
    const int error = errno;
    if (made >= 0) close(made);
    errno = error;
  }
  return -1;
}

}  // namespace

Socket::Socket(absl::FunctionRef<int()> make) : descriptor_(Registry::get().add(make)) {}

Socket::~Socket() {
  if (descriptor_ >= 0) Registry::get().remove(descriptor_);
}

std::string local_address_towards(const std::string& host) {
  std::string text;
  // Connecting a datagram socket sends nothing.
  const int found = first_socket(host, /*port=*/9, SOCK_DGRAM, [&](int descriptor, const addrinfo& address) {
    if (connect(descriptor, address.ai_addr, address.ai_addrlen) != 0) return false;
    const auto local = Endpoint::of(descriptor);
    text = numbers_of(local.any(), local.size);
    return !text.empty();
  });
  if (found < 0) throw_error("no network interface of this host reaches '", host, "'");
  close(found);
  return text;
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) throw_error("the network interfaces of this host are not known: ", std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces(found, &freeifaddrs);
  for (const auto& [family, size] : {std::pair{AF_INET, sizeof(sockaddr_in)}, {AF_INET6, sizeof(sockaddr_in6)}}) {
    for (const auto* each = found; each != nullptr; each = each->ifa_next) {
      const bool is_up = (each->ifa_flags & IFF_UP) != 0 && each->ifa_addr != nullptr;
      if (!is_up || name != each->ifa_name || each->ifa_addr->sa_family != family) continue;
      return numbers_of(each->ifa_addr, static_cast<socklen_t>(size));
    }
  }
  throw_error("this host has no network interface '", name, "' with an address; give the name of one");
}

std::string address_of_this_host() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  try {
    return local_address_towards(name);
  } catch (const std::runtime_error&) {  // the name leads nowhere
    return "127.0.0.1";
  }
}

int listen_at(int rank, const std::string& host, int port) {
  const int found = first_socket(host, port, SOCK_STREAM, listen_with);
  if (found >= 0) return found;
  throw_error("rank ", rank, " cannot listen at ", host, ":", port, ": ", std::strerror(errno),
              "; give an address of its host and a free port");
}

Endpoint Endpoint::of(int socket) {
  Endpoint endpoint;
  if (getsockname(socket, endpoint.any(), &endpoint.size) != 0) endpoint.size = 0;
  return endpoint;
}

}  // namespace gpipe
