#pragma once

#include <string_view>

namespace gpipe::examples {

/// Returns how viewers turn a JPEG or PNG, by its first bytes: EXIF's orientation, 1 to 8. 1 is as stored, and the default.
int exif_orientation(std::string_view bytes);

}  // namespace gpipe::examples
