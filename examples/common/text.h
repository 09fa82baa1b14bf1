#pragma once

#include <string>

#include "examples/common/canvas.h"
#include "examples/common/image.h"

namespace gpipe::examples {

/// A line of text, to be drawn into pictures. See print_glyph() for the characters; others are spaces. `height` is that
/// of a digit, in pixels; letters such as p reach 0.3 of it below the line.
struct Text {
  std::string characters;
  int height = 16;
};

/// In pixels.
int text_width(const Text& text);

/// Draws the text with its left edge at `left` and the top of its digits at `top`. Parts outside the picture are left
/// out. A picture of one channel takes ink.red.
void draw_text(Image& picture, int left, int top, const Text& text, Color ink);

/// The same, centred in a box.
void draw_text_centered(Image& picture, int left, int top, Size box, const Text& text, Color ink);

}  // namespace gpipe::examples
