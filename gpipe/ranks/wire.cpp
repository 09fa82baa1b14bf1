#include "gpipe/ranks/wire.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kHeaders = 0;
constexpr int kPieces = 1;
constexpr int kChanged = 2;

constexpr std::size_t kSmall = std::size_t{256} << 10;
constexpr std::size_t kLongestLayout = std::size_t{16} << 20;  // of about 200,000 tensors

// How many messages a receiver posts ahead: at least so many, and more while their memory is small.
constexpr std::size_t kAhead = 3;
constexpr std::size_t kAheadBytes = std::size_t{1} << 20;

constexpr std::uint64_t kMagic = 0x6770697065000001;

struct Header {
  std::uint64_t magic;
  std::uint64_t sequence;
  std::uint64_t label;
  std::uint64_t layout_bytes;  // 0: the last layout
  std::uint64_t values_bytes;
};

using Buffer = std::vector<std::byte>;

std::size_t total(const std::vector<std::size_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

template <typename Spans>
std::vector<std::size_t> sizes_of(const Spans& spans) {
  std::vector<std::size_t> sizes;
  for (const auto& span : spans) sizes.push_back(span.size());
  return sizes;
}

std::byte* append(std::byte* to, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
  return to + bytes;
}

std::size_t header_bytes(const LastLayout& last) {
  if (!last.known) return sizeof(Header);
  return sizeof(Header) + last.values + (last.is_small() ? total(last.pieces) : 0);
}

}  // namespace

std::size_t most_posted(std::size_t message) { return std::max(kAhead * message, kAheadBytes + message); }

bool LastLayout::is_small() const { return total(pieces) <= kSmall; }

WireSender::WireSender(Connections& connections, int peer, int first_tag, std::chrono::milliseconds limit)
    : connections_(connections), peer_(peer), first_tag_(first_tag), limit_(limit) {}

void WireSender::start(int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> owner) {
  auto transfer = connections_.send(peer_, first_tag_ + tag, bytes, std::move(owner));
  if (transfer->has_ended()) return;
  sent_.push_back({end_after(limit_), std::move(transfer)});
}

void WireSender::drain(std::chrono::milliseconds limit) {
  for (const auto end = end_after(limit); !sent_.empty(); sent_.pop_front()) {
    sent_.front().transfer->wait(std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()), /*poll=*/nullptr);
  }
}

void WireSender::send(LastLayout& last, std::uint64_t label, Outgoing message) {
  while (!sent_.empty() && sent_.front().transfer->has_ended()) sent_.pop_front();
  if (!sent_.empty() && Clock::now() >= sent_.front().end) throw TimeoutError("another rank did not answer in time");
  const bool same = last.known && message.layout == last.layout;
  const bool small = same && last.is_small();
  auto buffer = std::make_shared<Buffer>(same ? header_bytes(last) : sizeof(Header));
  const Header header{kMagic, sequence_++, label, same ? 0 : message.layout.size(), message.values.size()};
  auto* end = append(buffer->data(), &header, sizeof header);
  if (same) end = append(end, message.values.data(), message.values.size());
  if (small) {
    for (const auto piece : message.pieces) end = append(end, piece.data(), piece.size());
  }
  start(kHeaders, *buffer, buffer);
  if (small) return;
  if (!same) {
    if (last.known && !last.is_small()) {
      for (const auto piece : last.pieces) {
        if (piece != 0) start(kPieces, {}, nullptr);
      }
    }
    auto changed = std::make_shared<Buffer>(message.layout.size() + message.values.size());
    append(append(changed->data(), message.layout.data(), message.layout.size()), message.values.data(),
           message.values.size());
    start(kChanged, *changed, changed);
  }
  for (const auto piece : message.pieces) {
    if (!piece.empty()) start(same ? kPieces : kChanged, piece, message.owner);
  }
  if (!same) last = {std::move(message.layout), message.values.size(), sizes_of(message.pieces), true};
}

/// A message that has not been received: its memory, and the receives into it.
struct WireReceiver::Posted {
  LastLayout* last;
  Buffer header;
  Buffer changed;                     // layout and values, if they differ from the last ones
  std::unique_ptr<Incoming> message;  // null before it is received, if the pieces come with the header
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::exception_ptr error;  // if a receive could not start

  std::size_t bytes() const { return header.size() + (message ? total(last->pieces) : 0); }
};

WireReceiver::WireReceiver(Connections& connections, int peer, int first_tag, std::chrono::milliseconds limit,
                           Allocate allocate)
    : connections_(connections), peer_(peer), first_tag_(first_tag), limit_(limit), allocate_(std::move(allocate)) {}

WireReceiver::~WireReceiver() = default;

void WireReceiver::expect(std::deque<LastLayout>& layouts, std::size_t messages) {
  for (std::size_t i = 0; i < messages; ++i) expected_.push_back(&layouts.at(i));
  post();
}

void WireReceiver::post() {
  while (!expected_.empty() && (posted_.size() < kAhead || posted_bytes_ < kAheadBytes)) {
    auto& last = *expected_.front();
    expected_.pop_front();
    auto posted = std::make_unique<Posted>();
    posted->last = &last;
    posted->header.resize(header_bytes(last));
    if (last.known && !last.is_small()) posted->message = allocate_(last.layout);
    try {
      posted->transfers.push_back(connections_.receive(peer_, first_tag_ + kHeaders, posted->header));
      if (posted->message) {
        for (const auto piece : posted->message->pieces()) {
          if (!piece.empty()) posted->transfers.push_back(connections_.receive(peer_, first_tag_ + kPieces, piece));
        }
      }
    } catch (const ConnectionError&) {
      posted->error = std::current_exception();
    }
    posted_bytes_ += posted->bytes();
    posted_.push_back(std::move(posted));
  }
}

bool WireReceiver::has_next() const {
  return !posted_.empty() && (posted_.front()->error || posted_.front()->transfers.front()->has_ended());
}

std::unique_ptr<Incoming> WireReceiver::receive(std::uint64_t label, const Poll& poll) {
  auto& posted = *posted_.front();
  if (posted.error) std::rethrow_exception(posted.error);
  for (const auto& transfer : posted.transfers) transfer->wait(limit_, poll);
  Header header;
  std::memcpy(&header, posted.header.data(), sizeof header);
  if (header.magic != kMagic || header.sequence != sequence_ || header.label != label) {
    throw_error("rank ", peer_, " sent message ", header.sequence, " with label ", absl::Hex(header.label),
                ", but message ", sequence_, " with label ", absl::Hex(label),
                " was due; the ranks must run the same program");
  }
  auto& last = *posted.last;
  if (header.layout_bytes == 0 && (!last.known || header.values_bytes != last.values)) {
    throw_error("rank ", peer_, " sent message ", header.sequence,
                " without a layout, but it is not like the last one; run the same version of gpipe on all ranks");
  }
  ++sequence_;
  posted_bytes_ -= posted.bytes();
  if (header.layout_bytes != 0) {
    receive_changed(posted, header.layout_bytes, header.values_bytes, poll);
  } else {
    if (!posted.message) posted.message = allocate_(last.layout);
    const auto values = posted.message->values();
    const auto* from = posted.header.data() + sizeof header;
    append(values.data(), from, values.size());
    from += values.size();
    if (last.is_small()) {
      for (const auto piece : posted.message->pieces()) {
        append(piece.data(), from, piece.size());
        from += piece.size();
      }
    }
  }
  auto message = std::move(posted.message);
  posted_.pop_front();
  post();
  return message;
}

// What it receives into stays in `posted`, because after an error the receives may still be in flight.
void WireReceiver::receive_changed(Posted& posted, std::uint64_t layout_bytes, std::uint64_t values_bytes,
                                   const Poll& poll) {
  if (layout_bytes > kLongestLayout || values_bytes > kLongestLayout) {
    throw_error("rank ", peer_, " announced a layout of ", layout_bytes, " bytes with ", values_bytes,
                " bytes of values, but at most ", kLongestLayout, " are accepted");
  }
  const auto receive = [&](std::span<std::byte> bytes) {
    posted.transfers.push_back(connections_.receive(peer_, first_tag_ + kChanged, bytes));
    posted.transfers.back()->wait(limit_, poll);
  };
  posted.changed.resize(layout_bytes + values_bytes);
  receive(posted.changed);
  const std::string layout(reinterpret_cast<const char*>(posted.changed.data()), layout_bytes);
  posted.message = allocate_(layout);
  const auto values = posted.message->values();
  if (values.size() != values_bytes) {
    throw_error("rank ", peer_, " sent ", values_bytes, " bytes of values, but the layout has ", values.size());
  }
  append(values.data(), posted.changed.data() + layout_bytes, values.size());
  const auto pieces = posted.message->pieces();
  for (const auto piece : pieces) {
    if (!piece.empty()) receive(piece);
  }
  *posted.last = {layout, values.size(), sizes_of(pieces), true};
}

}  // namespace gpipe
