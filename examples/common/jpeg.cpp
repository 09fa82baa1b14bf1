#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "examples/common/codecs.h"
// Needs <cstdio> and does not include it.
#include <jpeglib.h>
// Needs <jpeglib.h> and does not include it.
#include <jerror.h>

namespace gpipe::examples {
namespace {

// Encoders write about ten. A small file with thousands would take minutes to decode.
constexpr int kMostScans = 500;

// libjpeg reports errors by a call that must not return. Exceptions must not cross its C frames, so the call jumps.
struct Errors : jpeg_error_mgr {
  Errors() {
    jpeg_std_error(this);
    error_exit = [](j_common_ptr codec) {
      char message[JMSG_LENGTH_MAX] = {};
      codec->err->format_message(codec, message);
      static_cast<Errors*>(codec->err)->stop(message);
    };
    // libjpeg only warns when it fills in missing or damaged pixels.
    emit_message = [](j_common_ptr codec, int level) {
      if (level < 0) codec->err->error_exit(codec);
    };
  }

  // `calls` must not own anything: an error jumps out of it.
  template <class Calls>
  void run(Calls calls) {
    static_assert(std::is_trivially_destructible_v<Calls>);
    if (setjmp(jump) != 0) throw std::runtime_error(text);
    calls();
  }

  [[noreturn]] void stop(const char* message) {
    std::strncpy(text, message, sizeof text - 1);
    std::longjmp(jump, 1);
  }

  std::jmp_buf jump;
  char text[JMSG_LENGTH_MAX] = {};
};

class Decoder {
 public:
  explicit Decoder(std::FILE* file) : source_(file) {
    codec_.err = &errors_;
    errors_.run([this] { jpeg_create_decompress(&codec_); });
    codec_.progress = &progress_;
    progress_.progress_monitor = [](j_common_ptr codec) {
      if (reinterpret_cast<j_decompress_ptr>(codec)->input_scan_number <= kMostScans) return;
      static_cast<Errors*>(codec->err)->stop("it has more scans than any encoder writes");
    };
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
    return image;
  }

 private:
  Size output_size() const { return {static_cast<int>(codec_.output_width), static_cast<int>(codec_.output_height)}; }

  Errors errors_;
  jpeg_decompress_struct codec_{};
  jpeg_progress_mgr progress_{};
  std::FILE* source_;
};

// Receives an encoder's bytes. jpeg_mem_dest() would leave a freed buffer if an error follows its growth.
struct Sink : jpeg_destination_mgr {
  Sink() {
    init_destination = [](j_compress_ptr codec) { grow(codec); };
    empty_output_buffer = [](j_compress_ptr codec) -> boolean {
      grow(codec);
      return TRUE;
    };
    term_destination = [](j_compress_ptr codec) {
      auto& bytes = static_cast<Sink*>(codec->dest)->bytes;
      bytes.resize(bytes.size() - codec->dest->free_in_buffer);
    };
  }

  // Enlarges a full buffer. Exceptions must not leave this function.
  static void grow(j_compress_ptr codec) {
    auto* sink = static_cast<Sink*>(codec->dest);
    const size_t used = sink->bytes.size();
    try {
      sink->bytes.resize(std::max<size_t>(4096, 2 * used));
    } catch (const std::exception&) {
    }
    if (sink->bytes.size() == used) ERREXIT1(codec, JERR_OUT_OF_MEMORY, 0);
    sink->next_output_byte = sink->bytes.data() + used;
    sink->free_in_buffer = sink->bytes.size() - used;
  }

  std::vector<uint8_t> bytes;
};

class Encoder {
 public:
  Encoder() {
    codec_.err = &errors_;
    errors_.run([this] { jpeg_create_compress(&codec_); });
    codec_.dest = &sink_;
  }
  ~Encoder() { jpeg_destroy_compress(&codec_); }
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  std::vector<uint8_t> write(const Image& image, int quality) {
    errors_.run([this, &image, quality] {
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
    return std::move(sink_.bytes);
  }

 private:
  Errors errors_;
  Sink sink_;
  jpeg_compress_struct codec_{};
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
