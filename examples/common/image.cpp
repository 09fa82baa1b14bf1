#include "examples/common/image.h"

#include <ATen/Functions.h>
#include <Magick++.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string_view>

#include "absl/strings/ascii.h"
#include "examples/common/files.h"

namespace gpipe::examples {
namespace {

constexpr int kLargestSide = 65535;
constexpr std::uint64_t kMostPixels = std::uint64_t{1} << 28;

struct Kind {
  const char* name;
  std::string_view begin;  // of a file
};
constexpr std::array<Kind, 5> kKinds{{{"JPEG", "\xff\xd8\xff"},
                                      {"PNG", "\x89PNG\r\n\x1a\n"},
                                      {"GIF", "GIF8"},
                                      {"TIFF", std::string_view("II*\0", 4)},
                                      {"TIFF", std::string_view("MM\0*", 4)}}};

// Returns how viewers turn a JPEG or PNG: EXIF's orientation, 1 to 8. 1 is as stored, and the default.
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

void start_graphics_magick() {
  static const auto once = MagickLib::InitializeMagickEx(nullptr, MAGICK_OPT_NO_SIGNAL_HANDER, nullptr);
  if (once == MagickFail) throw std::runtime_error("GraphicsMagick cannot start");
}

class File {
 public:
  explicit File(const std::filesystem::path& path) : bytes_(read_file(path)) {
    start_graphics_magick();
    if (bytes_.empty()) throw std::runtime_error("the file is empty");
    const auto begins = [&](const Kind& kind) { return bytes_.starts_with(kind.begin); };
    const auto kind = std::ranges::find_if(kKinds, begins);
    if (kind == kKinds.end()) throw std::runtime_error("not a JPEG, PNG, GIF or TIFF file");
    kind_ = kind->name;
    Magick::Image header;
    header.ping(blob());
    orientation_ = kind_ == "TIFF" ? header.orientation() : exif_orientation(bytes_);
    size_ = {static_cast<int>(header.columns()), static_cast<int>(header.rows())};
    const auto pixels = static_cast<std::uint64_t>(size_.width) * static_cast<std::uint64_t>(size_.height);
    if (size_.width <= kLargestSide && size_.height <= kLargestSide && pixels <= kMostPixels) return;
    throw std::runtime_error(examples::to_string(size_) + " pixels are too many; at most " +
                             std::to_string(kLargestSide) + " per side and " + std::to_string(kMostPixels) +
                             " in all are supported");
  }

  /// As viewers turn the image.
  Size size() const { return orientation_ > 4 ? Size{size_.height, size_.width} : size_; }

  /// Returns [3, height, width] of int, from 0 to 65535. A JPEG is decoded at the smallest size that the format offers
  /// and that is not below `wanted`.
  at::Tensor decode(const std::optional<Size>& wanted) const {
    Magick::Image image;
    const auto hint = wanted && orientation_ > 4 ? Size{wanted->height, wanted->width} : wanted.value_or(Size{});
    const Magick::Geometry smallest(static_cast<unsigned>(hint.width), static_cast<unsigned>(hint.height));
    image.read(blob(), kind_ == "JPEG" && wanted ? smallest : Magick::Geometry(), kind_);
    if (image.colorSpace() == Magick::CMYKColorspace) image.colorSpace(Magick::RGBColorspace);
    const auto width = static_cast<std::int64_t>(image.columns()), height = static_cast<std::int64_t>(image.rows());
    auto pixels = at::empty({height, width, 3}, at::kShort);
    image.write(0, 0, image.columns(), image.rows(), "RGB", Magick::ShortPixel, pixels.mutable_data_ptr());
    auto values = pixels.permute({2, 0, 1}).to(at::kInt).bitwise_and(0xffff);
    if (orientation_ > 4) values = values.transpose(1, 2);
    if ((orientation_ & 2) != 0) values = values.flip(2);
    if (((orientation_ - 1) & 2) != 0) values = values.flip(1);
    return values;
  }

 private:
  Magick::Blob blob() const { return {bytes_.data(), bytes_.size()}; }

  const std::string bytes_;
  std::string kind_;
  int orientation_ = 1;
  Size size_;
};

// GraphicsMagick warns of a file that is cut short by an exception, too.
template <class Use>
auto with_file(const std::filesystem::path& path, Use use) {
  return with_name(path, [&] {
    try {
      return use(File(path));
    } catch (const Magick::Exception& error) {
      throw std::runtime_error(error.what());
    }
  });
}

}  // namespace

std::string to_string(Size size) { return std::to_string(size.width) + "x" + std::to_string(size.height); }

Size to_size(const std::string& text) {
  Size size;
  char rest = 0;
  if (std::sscanf(text.c_str(), "%5dx%5d%c", &size.width, &size.height, &rest) != 2 || size.width < 1 ||
      size.height < 1) {
    throw std::invalid_argument("'" + text + "' is not a size such as 192x128");
  }
  return size;
}

Size scaled(Size size, double scale) {
  if (!(scale > 0 && scale <= 1)) {
    throw std::invalid_argument("scale is " + std::to_string(scale) + "; it must be above 0 and at most 1");
  }
  const auto side = [scale](int pixels) { return std::max(1, static_cast<int>(std::lround(pixels * scale))); };
  return {side(size.width), side(size.height)};
}

bool is_named_as_image(const std::filesystem::path& path) {
  constexpr std::array<std::string_view, 6> kEndings = {".jpg", ".jpeg", ".png", ".gif", ".tif", ".tiff"};
  const auto ending = absl::AsciiStrToLower(path.extension().string());
  return !path.filename().string().starts_with('.') && std::ranges::find(kEndings, ending) != kEndings.end();
}

Size image_size(const std::filesystem::path& path) {
  return with_file(path, [](const File& file) { return file.size(); });
}

at::Tensor read_image(const std::filesystem::path& path, std::optional<Size> wanted) {
  const auto values = with_file(path, [&](const File& file) { return file.decode(wanted); });
  const auto image = values.add(128).floor_divide(257).to(at::kByte);
  return wanted ? resize_smoothly(image, *wanted) : image;
}

at::Tensor read_numbers(const std::filesystem::path& path) {
  auto values = with_file(path, [](const File& file) { return file.decode(std::nullopt); });
  return values.remainder(257).any().item<bool>() ? values : values.floor_divide(257);
}

at::Tensor resize_smoothly(const at::Tensor& image, Size size) {
  if (image.size(1) == size.height && image.size(2) == size.width) return image;
  return at::_upsample_bilinear2d_aa(image.unsqueeze(0), {size.height, size.width}, /*align_corners=*/false)[0];
}

at::Tensor resize_nearest(const at::Tensor& labels, Size size) {
  if (labels.size(0) == size.height && labels.size(1) == size.width) return labels;
  const auto batch = labels.view({1, 1, labels.size(0), labels.size(1)});
  return at::_upsample_nearest_exact2d(batch, {size.height, size.width})[0][0];
}

void write_png(const std::filesystem::path& path, const at::Tensor& image) {
  start_graphics_magick();
  const auto colors = (image.dim() == 2 ? image.expand({3, -1, -1}) : image).permute({1, 2, 0}).contiguous();
  Magick::Image picture(static_cast<unsigned>(colors.size(1)), static_cast<unsigned>(colors.size(0)), "RGB",
                        Magick::CharPixel, colors.const_data_ptr());
  picture.magick("PNG");
  picture.depth(8);
  Magick::Blob png;
  picture.write(&png);
  write_file(path, {static_cast<const char*>(png.data()), png.length()});
}

at::Tensor draw_table(const std::vector<at::Tensor>& columns) {
  constexpr std::int64_t kSmallestTile = 256, kGap = 4;
  std::vector<at::Tensor> drawn;
  for (const auto& tiles : columns) {
    const auto factor = (kSmallestTile - 1) / std::max(tiles.size(2), tiles.size(3)) + 1;
    const auto enlarged = tiles.repeat_interleave(factor, 2).repeat_interleave(factor, 3);
    drawn.push_back(at::cat(at::constant_pad_nd(enlarged, {0, kGap, 0, kGap}).unbind(0), 1));
  }
  return at::cat(drawn, 2).clamp(0, 1).mul(255).round().to(at::kByte);
}

}  // namespace gpipe::examples
