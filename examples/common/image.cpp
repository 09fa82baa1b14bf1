#include "examples/common/image.h"

#include <ATen/Functions.h>
#include <gif_lib.h>
#include <png.h>
#include <turbojpeg.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "examples/common/exif.h"
#include "examples/common/files.h"

namespace gpipe::examples {
namespace {

using Wanted = std::optional<Size>;

constexpr int kLargestSide = 65535;
constexpr std::uint64_t kMostPixels = std::uint64_t{1} << 28;
// Read from a file of any length, because the header can be longer than the pixels.
constexpr std::uint64_t kFewPixels = std::uint64_t{1} << 20;
constexpr std::size_t kLongestHeader = 1 << 20;

// Decoders return [height, width, 3]. Their errors have no name of a file.
at::Tensor new_pixels(Size size, int channels = 3) { return at::zeros({size.height, size.width, channels}, at::kByte); }

// --- Orientation

Size turned(Size size, int orientation) { return orientation > 4 ? Size{size.height, size.width} : size; }

at::Tensor turned(at::Tensor image, int orientation) {
  if (orientation > 4) image = image.transpose(1, 2);
  if ((orientation & 2) != 0) image = image.flip(2);
  if (((orientation - 1) & 2) != 0) image = image.flip(1);
  return image;
}

// --- JPEG

class Jpeg {
 public:
  explicit Jpeg(std::string_view bytes)
      : data_(reinterpret_cast<const unsigned char*>(bytes.data())), count_(bytes.size()) {
    int subsampling = 0;
    check(tjDecompressHeader3(codec_.get(), data_, count_, &size_.width, &size_.height, &subsampling, &colorspace_));
  }

  Size size() const { return size_; }

  // Decodes at the smallest size that the format offers and that is not below `wanted`.
  at::Tensor decode(Wanted wanted) {
    Size best = size_;
    int factors = 0;
    const tjscalingfactor* factor = tjGetScalingFactors(&factors);
    for (; wanted && factors > 0; --factors, ++factor) {
      const Size size{TJSCALED(size_.width, (*factor)), TJSCALED(size_.height, (*factor))};
      if (size.width >= wanted->width && size.height >= wanted->height && size.width < best.width) best = size;
    }
    const bool inks = colorspace_ == TJCS_CMYK || colorspace_ == TJCS_YCCK;
    auto pixels = new_pixels(best, inks ? 4 : 3);
    // Damaged pixels are only a warning. A small file with thousands of scans would take minutes.
    constexpr int kFlags = TJFLAG_ACCURATEDCT | TJFLAG_STOPONWARNING | TJFLAG_LIMITSCANS;
    check(tjDecompress2(codec_.get(), data_, count_, pixels.mutable_data_ptr<std::uint8_t>(), best.width, 0,
                        best.height, inks ? TJPF_CMYK : TJPF_RGB, kFlags));
    if (!inks) return pixels;
    // By Adobe's convention, a file has 255 for no ink.
    const auto products = pixels.narrow(2, 0, 3).to(at::kInt) * pixels.narrow(2, 3, 1);
    return (products + 127).floor_divide(255).to(at::kByte);
  }

 private:
  void check(int result) const {
    if (result != 0) throw std::runtime_error(tjGetErrorStr2(codec_.get()));
  }

  const std::unique_ptr<void, int (*)(tjhandle)> codec_{tjInitDecompress(), tjDestroy};
  const unsigned char* data_;
  const std::size_t count_;
  Size size_;
  int colorspace_ = 0;
};

// --- PNG

class Png {
 public:
  explicit Png(std::string bytes) : bytes_(std::move(bytes)) {
    // Hides the gamma from libpng, which would convert the values.
    if (const auto gamma = bytes_.find("gAMA"); gamma < bytes_.find("IDAT")) bytes_[gamma + 1] = 'a';
    png_.version = PNG_IMAGE_VERSION;
    check(png_image_begin_read_from_memory(&png_, bytes_.data(), bytes_.size()));
    if ((png_.format & PNG_FORMAT_FLAG_LINEAR) == 0) return;
    png_image_free(&png_);
    throw std::runtime_error("16 bits per channel are not supported; write 8");
  }
  ~Png() { png_image_free(&png_); }
  Png(const Png&) = delete;
  Png& operator=(const Png&) = delete;

  Size size() const { return {static_cast<int>(png_.width), static_cast<int>(png_.height)}; }

  at::Tensor decode(Wanted) {
    // Without alpha channel, libpng would blend transparent pixels with a background.
    const bool alpha = (png_.format & PNG_FORMAT_FLAG_ALPHA) != 0;
    png_.format = alpha ? PNG_FORMAT_RGBA : PNG_FORMAT_RGB;
    auto pixels = at::empty({size().height, size().width, alpha ? 4 : 3}, at::kByte);
    check(png_image_finish_read(&png_, nullptr, pixels.mutable_data_ptr(), 0, nullptr));
    return pixels.narrow(2, 0, 3);
  }

 private:
  void check(int result) const {
    if (result == 0) throw std::runtime_error(png_.message);
  }

  std::string bytes_;
  png_image png_{};
};

// --- GIF

class Gif {
 public:
  explicit Gif(std::string_view bytes) : rest_(bytes) {
    int error = 0;
    gif_.reset(DGifOpen(&rest_, read, &error));
    if (!gif_) fail(error);
    if (gif_->SWidth < 1 || gif_->SHeight < 1) throw std::runtime_error("the GIF has no pixels");
  }

  Size size() const { return {gif_->SWidth, gif_->SHeight}; }

  at::Tensor decode(Wanted) {
    find_frame();
    const GifImageDesc& frame = gif_->Image;
    const ColorMapObject* palette = frame.ColorMap != nullptr ? frame.ColorMap : gif_->SColorMap;
    if (palette == nullptr) throw std::runtime_error("the GIF has no palette");
    if (frame.Width < 1 || frame.Height < 1) throw std::runtime_error("the GIF's first frame has no pixels");
    auto pixels = new_pixels(size());
    const auto pixel = pixels.accessor<std::uint8_t, 3>();
    std::vector<GifPixelType> row(static_cast<std::size_t>(frame.Width));
    for (const int y : row_order(frame)) {
      check(DGifGetLine(gif_.get(), row.data(), frame.Width));
      for (int x = 0; x < frame.Width; ++x) {
        if (row[x] >= palette->ColorCount) throw std::runtime_error("the GIF uses a colour that its palette lacks");
        if (frame.Left + x >= size().width || frame.Top + y >= size().height) continue;
        const auto& [red, green, blue] = palette->Colors[row[x]];
        const std::array<std::uint8_t, 3> color{red, green, blue};
        std::copy(color.begin(), color.end(), pixel[frame.Top + y][frame.Left + x].data());
      }
    }
    return pixels;
  }

 private:
  struct Closer {
    void operator()(GifFileType* gif) const { DGifCloseFile(gif, nullptr); }
  };

  static int read(GifFileType* gif, GifByteType* bytes, int count) {
    auto& rest = *static_cast<std::string_view*>(gif->UserData);
    const auto taken = std::min(rest.size(), static_cast<std::size_t>(count));
    std::memcpy(bytes, rest.data(), taken);
    rest.remove_prefix(taken);
    return static_cast<int>(taken);
  }

  [[noreturn]] static void fail(int code) {
    const char* text = GifErrorString(code);
    throw std::runtime_error(text != nullptr ? text : "the GIF is damaged or cut short");
  }
  void check(int result) const {
    if (result != GIF_OK) fail(gif_->Error);
  }

  // Reads the header of the first frame.
  void find_frame() {
    for (;;) {
      GifRecordType type = UNDEFINED_RECORD_TYPE;
      check(DGifGetRecordType(gif_.get(), &type));
      if (type == TERMINATE_RECORD_TYPE) throw std::runtime_error("the GIF has no frame");
      if (type == IMAGE_DESC_RECORD_TYPE) return check(DGifGetImageDesc(gif_.get()));
      int code = 0;
      GifByteType* block = nullptr;
      check(DGifGetExtension(gif_.get(), &code, &block));
      while (block != nullptr) check(DGifGetExtensionNext(gif_.get(), &block));
    }
  }

  // The rows in the order of the file.
  static std::vector<int> row_order(const GifImageDesc& frame) {
    std::vector<int> rows;
    const std::vector<std::array<int, 2>> interlaced = {{0, 8}, {4, 8}, {2, 4}, {1, 2}};
    for (const auto& [first, step] : frame.Interlace ? interlaced : std::vector<std::array<int, 2>>{{0, 1}}) {
      for (int y = first; y < frame.Height; y += step) rows.push_back(y);
    }
    return rows;
  }

  std::string_view rest_;
  std::unique_ptr<GifFileType, Closer> gif_;
};

// Opens the file's first bytes as Jpeg, Png or Gif, checks the size, and calls `use` with it and the orientation.
template <class Use>
auto with_image(const std::filesystem::path& path, std::size_t most_bytes, Use use) {
  return with_name(path, [&] {
    const auto bytes = read_file(path, most_bytes);
    const auto all_bytes = std::filesystem::file_size(path);
    if (bytes.empty()) throw std::runtime_error("the file is empty");
    const auto checked = [&](auto image, std::uint64_t pixels_per_byte) {
      const Size size = image.size();
      const auto pixels = static_cast<std::uint64_t>(size.width) * static_cast<std::uint64_t>(size.height);
      if (size.width > kLargestSide || size.height > kLargestSide || pixels > kMostPixels) {
        throw std::runtime_error(to_string(size) + " pixels are too many; at most " + std::to_string(kLargestSide) +
                                 " per side and " + std::to_string(kMostPixels) + " in all are supported");
      }
      if (pixels > std::max(kFewPixels, all_bytes * pixels_per_byte)) {
        throw std::runtime_error("damaged: " + to_string(size) + " pixels do not fit into " +
                                 std::to_string(all_bytes) + " bytes");
      }
      // What is before the pixels, so that image_size() and read_image() see the same.
      const auto header = std::string_view(bytes).substr(0, std::min(kLongestHeader, bytes.find("IDAT")));
      return use(image, exif_orientation(header));
    };
    // No encoder fits more pixels into a byte. JPEG: at least one bit per block of 64 pixels. PNG: deflate expands a
    // byte to at most 1032 bytes of 8 pixels each. GIF: at least 12 bits per string of fewer than 4096 pixels.
    if (bytes.starts_with("\xff\xd8\xff")) return checked(Jpeg(bytes), 8 * 64);
    if (bytes.starts_with("\x89PNG\r\n\x1a\n")) return checked(Png(bytes), 8 * 1032);
    if (bytes.starts_with("GIF8")) return checked(Gif(bytes), 8 * 4096 / 12);
    throw std::runtime_error("not a JPEG, PNG or GIF file");
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

Size image_size(const std::filesystem::path& path) {
  return with_image(path, kLongestHeader,
                    [](const auto& image, int orientation) { return turned(image.size(), orientation); });
}

at::Tensor read_image(const std::filesystem::path& path, std::optional<Size> wanted) {
  constexpr auto kAll = std::numeric_limits<std::size_t>::max();
  const auto pixels = with_image(path, kAll, [&](auto& image, int orientation) {
    const auto in_file = wanted ? Wanted(turned(*wanted, orientation)) : wanted;
    return turned(image.decode(in_file).permute({2, 0, 1}), orientation);
  });
  return wanted ? resize_smoothly(pixels, *wanted) : pixels;
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

}  // namespace gpipe::examples
