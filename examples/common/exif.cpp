#include "examples/common/exif.h"

#include <cstddef>
#include <cstdint>

namespace gpipe::examples {

int exif_orientation(std::string_view bytes) {
  constexpr std::size_t kOrientation = 0x112;
  for (const std::string_view mark : {std::string_view("Exif\0\0", 6), std::string_view("eXIf")}) {  // of JPEG, PNG
    const auto begin = bytes.find(mark);
    if (begin == std::string_view::npos) continue;
    const auto exif = bytes.substr(begin + mark.size());
    const bool little_endian = exif.starts_with("II");
    const auto number = [&](std::size_t at, std::size_t count) {  // 0 beyond the end
      std::size_t value = 0;
      for (std::size_t i = 0; i < count && at + count <= exif.size(); ++i) {
        value = value << 8 | static_cast<std::uint8_t>(exif[at + (little_endian ? count - 1 - i : i)]);
      }
      return value;
    };
    const auto first = number(4, 4);
    const auto fields = number(first, 2);
    for (std::size_t field = first + 2; field < first + 2 + 12 * fields; field += 12) {
      const auto value = number(field + 8, 2);
      if (number(field, 2) == kOrientation && 1 <= value && value <= 8) return static_cast<int>(value);
    }
  }
  return 1;
}

}  // namespace gpipe::examples
