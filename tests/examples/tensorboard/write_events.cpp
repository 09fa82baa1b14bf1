// Writes what run.py expects: an event file, and the PNG that the event file holds.

#include <cstdint>
#include <filesystem>

#include "examples/common/codecs.h"
#include "examples/common/files.h"
#include "examples/common/image.h"
#include "examples/common/tensorboard.h"

int main(int, char** argv) {
  using namespace gpipe::examples;
  const std::filesystem::path directory = argv[1];
  Image image({300, 20}, 3);
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      image.at(x, y)[0] = static_cast<uint8_t>(x);
      image.at(x, y)[1] = static_cast<uint8_t>(10 * y);
      image.at(x, y)[2] = static_cast<uint8_t>(x * y);
    }
  }
  const auto png = encode_png(image);

  EventFile events(directory);
  for (int step = 1; step <= 200; ++step) events.add_scalar("loss/train", step, 1.0 / step);
  events.add_scalar("Dice", int64_t{1} << 40, -0.5);
  events.add_image("samples", 0, png, image.width, image.height);
  events.add_image("samples", 300, png, image.width, image.height);
  write_file(directory / "samples.png", png);
  return 0;
}
