#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "examples/common/codecs.h"
// After <cstdio>, which it needs and does not include.
#include <jpeglib.h>

namespace gpipe::examples {
namespace {

// libjpeg reports errors by a call that must not return; throwing across its C frames is undefined, so it jumps.
struct Errors : jpeg_error_mgr {
  Errors() {
    jpeg_std_error(this);
    error_exit = [](j_common_ptr codec) {
      auto* self = static_cast<Errors*>(codec->err);
      self->format_message(codec, self->text);
      std::longjmp(self->jump, 1);
    };
    emit_message = [](j_common_ptr codec, int level) {
      auto* self = static_cast<Errors*>(codec->err);
      if (level < 0 && self->num_warnings++ == 0) self->format_message(codec, self->text);
    };
  }

  // `calls` must own nothing: an error jumps out of it.
  template <class Calls>
  void run(Calls calls) {
    if (setjmp(jump) != 0) throw std::runtime_error(text);
    calls();
  }

  std::jmp_buf jump;
  char text[JMSG_LENGTH_MAX] = {};
};

class Decoder {
 public:
  explicit Decoder(std::FILE* file) {
    codec_.err = &errors_;
    errors_.run([this] { jpeg_create_decompress(&codec_); });
    source_ = file;
  }
  ~Decoder() { jpeg_destroy_decompress(&codec_); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  Size read_header() {
    errors_.run([this] {
      jpeg_stdio_src(&codec_, source_);
      jpeg_read_header(&codec_, TRUE);
    });
    return {static_cast<int>(codec_.image_width), static_cast<int>(codec_.image_height)};
  }

  Image read_pixels(std::optional<Size> wanted) {
    errors_.run([this, wanted] {
      codec_.out_color_space = JCS_RGB;
      codec_.scale_denom = 8;
      codec_.scale_num = wanted ? 1 : 8;
      jpeg_calc_output_dimensions(&codec_);
      while (wanted && codec_.scale_num < 8 &&
             (output_size().width < wanted->width || output_size().height < wanted->height)) {
        ++codec_.scale_num;
        jpeg_calc_output_dimensions(&codec_);
      }
    });
    Image image(output_size(), 3);
    errors_.run([this, &image] {
      jpeg_start_decompress(&codec_);
      while (codec_.output_scanline < codec_.output_height) {
        JSAMPROW row = image.at(0, static_cast<int>(codec_.output_scanline));
        jpeg_read_scanlines(&codec_, &row, 1);
      }
      jpeg_finish_decompress(&codec_);
    });
    // libjpeg fills what is missing with grey and only warns.
    if (errors_.num_warnings > 0) throw std::runtime_error(errors_.text);
    return image;
  }

 private:
  Size output_size() const { return {static_cast<int>(codec_.output_width), static_cast<int>(codec_.output_height)}; }

  Errors errors_;
  jpeg_decompress_struct codec_{};
  std::FILE* source_ = nullptr;
};

class Encoder {
 public:
  Encoder() {
    codec_.err = &errors_;
    errors_.run([this] { jpeg_create_compress(&codec_); });
  }
  ~Encoder() {
    jpeg_destroy_compress(&codec_);
    std::free(bytes_);
  }
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  std::vector<uint8_t> write(const Image& image, int quality) {
    errors_.run([this, &image, quality] {
      jpeg_mem_dest(&codec_, &bytes_, &length_);
      codec_.image_width = static_cast<JDIMENSION>(image.width);
      codec_.image_height = static_cast<JDIMENSION>(image.height);
      codec_.input_components = image.channels;
      codec_.in_color_space = image.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
      jpeg_set_defaults(&codec_);
      jpeg_set_quality(&codec_, quality, TRUE);
      jpeg_start_compress(&codec_, TRUE);
      while (codec_.next_scanline < codec_.image_height) {
        auto* row = const_cast<JSAMPROW>(image.at(0, static_cast<int>(codec_.next_scanline)));
        jpeg_write_scanlines(&codec_, &row, 1);
      }
      jpeg_finish_compress(&codec_);
    });
    return {bytes_, bytes_ + length_};
  }

 private:
  Errors errors_;
  jpeg_compress_struct codec_{};
  unsigned char* bytes_ = nullptr;
  unsigned long length_ = 0;
};

}  // namespace

Size jpeg_size(std::FILE* file) { return Decoder(file).read_header(); }

Image decode_jpeg(std::FILE* file, std::optional<Size> wanted) {
  Decoder decoder(file);
  decoder.read_header();
  return decoder.read_pixels(wanted);
}

std::vector<uint8_t> encode_jpeg(const Image& image, int quality) { return Encoder().write(image, quality); }

}  // namespace gpipe::examples
