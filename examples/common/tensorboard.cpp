#include "examples/common/tensorboard.h"

#include <array>
#include <bit>
#include <chrono>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "absl/strings/str_format.h"

namespace gpipe::examples {
namespace {

using Clock = std::chrono::system_clock;

// TensorBoard recognizes event files by the prefix.
constexpr std::string_view kPrefix = "events.out.tfevents.";
constexpr std::string_view kSuffix = ".gpipe";

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < table.size(); ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}

template <class Unsigned>
std::string little_endian(Unsigned value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof value; ++i) bytes.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  return bytes;
}

// The format stores CRCs in a changed form, because a CRC over data that contains CRCs is weak.
std::string masked_crc(std::string_view data) {
  return little_endian(std::rotr(crc32c(data), 15) + uint32_t{0xa282ead8});
}

// The wire format of protocol buffers: a field is its number and kind, followed by its value.
enum Kind : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string field(uint32_t number, Kind kind, std::string_view value) {
  return varint(number << 3 | kind).append(value);
}

std::string integer_field(uint32_t number, int64_t value) {
  return field(number, kVarint, varint(static_cast<uint64_t>(value)));
}

std::string bytes_field(uint32_t number, std::string_view value) {
  return field(number, kBytes, varint(value.size()).append(value));
}

std::string double_field(uint32_t number, double value) {
  return field(number, kFixed64, little_endian(std::bit_cast<uint64_t>(value)));
}

std::string float_field(uint32_t number, float value) {
  return field(number, kFixed32, little_endian(std::bit_cast<uint32_t>(value)));
}

// Fields of TensorBoard's message Event: a time and a step, then a version, or a summary of one value.
std::string time_and_step(double seconds, int64_t step) { return double_field(1, seconds) + integer_field(2, step); }
std::string file_version(std::string_view text) { return bytes_field(3, text); }
std::string summary(std::string_view tag, std::string_view content) {
  return bytes_field(5, bytes_field(1, bytes_field(1, tag).append(content)));
}

// The fields of a summary's value after its tag.
std::string scalar(double value) { return float_field(2, static_cast<float>(value)); }
std::string image(int width, int height, std::string_view png) {
  return bytes_field(4, integer_field(1, height) + integer_field(2, width) + bytes_field(4, png));
}

// TensorBoard reads the files of a folder in the order of their names.
std::filesystem::path new_file(const std::filesystem::path& folder) {
  make_directory(folder);
  const int64_t seconds = Clock::to_time_t(Clock::now());
  for (int number = 0;; ++number) {
    auto path = folder / absl::StrFormat("%s%010d.%03d%s", kPrefix, seconds, number, kSuffix);
    if (!std::filesystem::exists(path)) return path;
  }
}

// Takes bytes off the front of a text. Returns std::nullopt if it is shorter.
std::optional<std::string_view> take(std::string_view& text, uint64_t count) {
  if (count > text.size()) return std::nullopt;
  const auto bytes = text.substr(0, count);
  text.remove_prefix(count);
  return bytes;
}

std::optional<uint64_t> take_varint(std::string_view& text) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto byte = take(text, 1);
    if (!byte) return std::nullopt;
    const auto bits = static_cast<uint8_t>(byte->front());
    value |= uint64_t{bits & 0x7fu} << shift;
    if (bits < 0x80) return value;
  }
  return std::nullopt;
}

// A field of a message. `value` is that of a varint, or else the number of bytes.
struct EventField {
  uint64_t number = 0;
  uint64_t value = 0;
  std::string_view bytes;
};

std::optional<EventField> take_field(std::string_view& message) {
  const auto key = take_varint(message);
  if (!key) return std::nullopt;
  const auto kind = *key & 7;
  const auto value = kind == kFixed64 ? 8 : kind == kFixed32 ? 4 : take_varint(message);
  if (!value) return std::nullopt;
  const auto bytes = take(message, kind == kVarint ? 0 : *value);
  if (!bytes) return std::nullopt;
  return EventField{*key >> 3, *value, *bytes};
}

// Returns an empty field if the message has none of this number.
EventField find_field(std::string_view message, uint64_t number) {
  while (const auto field = take_field(message)) {
    if (field->number == number) return *field;
  }
  return {};
}

// Takes a record off the front. Returns std::nullopt if it is not whole.
std::optional<std::string_view> take_record(std::string_view& text) {
  const auto length = take(text, 8);
  const auto length_crc = take(text, 4);
  if (!length || !length_crc || masked_crc(*length) != *length_crc) return std::nullopt;
  uint64_t size = 0;
  for (int i = 0; i < 8; ++i) size |= uint64_t{static_cast<uint8_t>((*length)[i])} << (8 * i);
  const auto data = take(text, size);
  const auto crc = take(text, 4);
  if (!data || !crc || masked_crc(*data) != *crc) return std::nullopt;
  return data;
}

}  // namespace

bool is_event_file(std::string_view name) { return name.starts_with(kPrefix) && name.ends_with(kSuffix); }

uint32_t crc32c(std::string_view data) {
  static constexpr auto kTable = crc_table();
  uint32_t crc = ~uint32_t{0};
  for (const char byte : data) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint8_t>(byte)) & 0xff];
  return ~crc;
}

void cut_event_files(const std::filesystem::path& folder,
                     const std::function<bool(std::string_view tag, int64_t step)>& keeps) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (is_event_file(entry.path().filename().string())) paths.push_back(entry.path());
  }
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + path.string());
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    std::string_view rest = bytes;
    std::size_t kept = 0;
    while (const auto record = take_record(rest)) {
      const auto step = static_cast<int64_t>(find_field(*record, 2).value);
      const auto tag = find_field(find_field(find_field(*record, 5).bytes, 1).bytes, 1).bytes;
      if (tag.empty()) continue;  // the version
      if (!keeps(tag, step)) break;
      kept = bytes.size() - rest.size();
    }
    std::error_code error;
    if (kept == 0) {
      std::filesystem::remove(path, error);
    } else if (kept < bytes.size()) {
      std::filesystem::resize_file(path, kept, error);
    }
    if (error) throw std::runtime_error("cannot cut " + path.string() + ": " + error.message());
  }
}

EventFile::EventFile(const std::filesystem::path& folder) : file_(new_file(folder)) {
  add_event(0, file_version("brain.Event:2"));
  flush();
}

void EventFile::add_scalar(std::string_view tag, int64_t step, double value) {
  add_event(step, summary(tag, scalar(value)));
}

void EventFile::add_image(std::string_view tag, int64_t step, const std::vector<uint8_t>& png, int width, int height) {
  const std::string_view bytes(reinterpret_cast<const char*>(png.data()), png.size());
  add_event(step, summary(tag, image(width, height, bytes)));
}

void EventFile::flush() { file_.flush(); }

void EventFile::add_event(int64_t step, std::string_view content) {
  const double now = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  write_record(time_and_step(now, step).append(content));
}

void EventFile::write_record(std::string_view data) {
  const auto length = little_endian(uint64_t{data.size()});
  file_.write(length + masked_crc(length));
  file_.write(data);
  file_.write(masked_crc(data));
}

}  // namespace gpipe::examples
