#include "examples/common/glyphs.h"

#include <array>
#include <cstddef>
#include <map>
#include <utility>

namespace gpipe::examples {
namespace {

Stroke straight(std::vector<Knot> knots) { return {Stroke::Kind::kStraight, std::move(knots)}; }
Stroke smooth(std::vector<Knot> knots) { return {Stroke::Kind::kSmooth, std::move(knots)}; }

std::vector<Glyph> zeros() {
  const Stroke oval = smooth({{30, 0}, {8, 24}, {8, 76}, {30, 100}, {52, 76}, {52, 24}, {30, 0}});
  return {
      {oval},
      {oval, straight({{46, 22}, {14, 78}})},
      {smooth({{34, 0}, {6, 40}, {14, 90}, {36, 98}, {56, 60}, {46, 8}, {20, 6}})},
      {straight({{20, 0}, {40, 0}, {55, 20}, {55, 80}, {40, 100}, {20, 100}, {5, 80}, {5, 20}, {20, 0}})},
      {straight({{5, 0}, {55, 0}, {55, 100}, {5, 100}, {5, 0}})},
  };
}

std::vector<Glyph> ones() {
  return {
      {straight({{30, 0}, {30, 100}})},
      {straight({{12, 24}, {32, 0}, {32, 100}})},
      {straight({{14, 20}, {32, 0}, {32, 100}}), straight({{12, 100}, {52, 100}})},
      {smooth({{36, 0}, {32, 34}, {28, 66}, {26, 100}})},
  };
}

std::vector<Glyph> twos() {
  return {
      {smooth({{8, 24}, {15, 6}, {32, 0}, {50, 10}, {51, 32}, {36, 60}, {6, 100}}), straight({{6, 100}, {56, 100}})},
      {smooth({{8, 18}, {26, 0}, {48, 12}, {46, 42}, {24, 82}, {8, 94}, {10, 80}, {28, 86}, {56, 98}})},
      {straight({{8, 18}, {22, 0}, {42, 0}, {54, 16}, {54, 34}, {6, 100}, {56, 100}})},
      {straight({{5, 0}, {55, 0}, {55, 50}, {5, 50}, {5, 100}, {55, 100}})},
  };
}

std::vector<Glyph> threes() {
  return {
      {smooth({{8, 12}, {30, 0}, {50, 14}, {46, 36}, {26, 47}}),
       smooth({{26, 47}, {50, 58}, {54, 80}, {34, 100}, {6, 90}})},
      {straight({{8, 0}, {52, 0}, {26, 42}}), smooth({{26, 42}, {50, 54}, {54, 80}, {32, 100}, {6, 90}})},
      {straight({{6, 10}, {18, 0}, {42, 0}, {52, 12}, {52, 36}, {40, 48}, {22, 48}}),
       straight({{40, 48}, {54, 60}, {54, 88}, {42, 100}, {18, 100}, {6, 90}})},
      {straight({{5, 0}, {55, 0}, {55, 100}, {5, 100}}), straight({{12, 50}, {55, 50}})},
  };
}

std::vector<Glyph> fours() {
  return {
      {straight({{16, 0}, {6, 58}, {56, 58}}), straight({{42, 30}, {42, 100}})},
      {straight({{42, 100}, {42, 0}, {4, 68}, {56, 68}})},
      {smooth({{14, 2}, {8, 30}, {14, 52}, {32, 56}, {50, 44}}), straight({{52, 2}, {46, 100}})},
      {straight({{5, 0}, {5, 50}, {55, 50}}), straight({{55, 0}, {55, 100}})},
  };
}

std::vector<Glyph> fives() {
  return {
      {straight({{52, 0}, {14, 0}, {10, 44}}), smooth({{10, 44}, {34, 38}, {54, 58}, {50, 86}, {28, 100}, {6, 90}})},
      {smooth({{52, 4}, {24, 0}, {10, 18}, {18, 42}, {42, 52}, {54, 74}, {38, 98}, {6, 92}})},
      {straight({{54, 0}, {8, 0}, {8, 44}, {40, 44}, {54, 56}, {54, 88}, {42, 100}, {18, 100}, {6, 90}})},
      {straight({{55, 0}, {5, 0}, {5, 50}, {55, 50}, {55, 100}, {5, 100}})},
  };
}

std::vector<Glyph> sixes() {
  return {
      {smooth({{46, 2}, {22, 22}, {8, 58}, {10, 86}, {30, 100}, {50, 88}, {52, 66}, {34, 54}, {10, 72}})},
      {straight({{42, 0}, {12, 58}}), smooth({{30, 46}, {8, 60}, {8, 86}, {30, 100}, {52, 86}, {52, 60}, {30, 46}})},
      {straight(
          {{48, 4}, {36, 0}, {20, 0}, {6, 18}, {6, 86}, {18, 100}, {42, 100}, {54, 88}, {54, 62}, {42, 50}, {6, 50}})},
      {straight({{55, 0}, {5, 0}, {5, 100}, {55, 100}, {55, 50}, {5, 50}})},
  };
}

std::vector<Glyph> sevens() {
  const Stroke hook = straight({{6, 0}, {54, 0}, {22, 100}});
  return {
      {hook},
      {hook, straight({{18, 50}, {52, 50}})},
      {straight({{6, 6}, {54, 2}}), smooth({{54, 2}, {36, 36}, {26, 68}, {24, 100}})},
      {straight({{5, 18}, {5, 0}, {55, 0}, {55, 100}})},
  };
}

std::vector<Glyph> eights() {
  return {
      {smooth({{30, 47}, {11, 34}, {12, 10}, {30, 0}, {48, 10}, {49, 34}, {30, 47}}),
       smooth({{30, 47}, {8, 62}, {8, 88}, {30, 100}, {52, 88}, {52, 62}, {30, 47}})},
      {smooth({{50, 12},
               {30, 0},
               {11, 12},
               {16, 36},
               {44, 60},
               {52, 84},
               {30, 100},
               {8, 84},
               {16, 60},
               {44, 36},
               {50, 12}})},
      {straight({{52, 4}, {10, 4}, {52, 98}, {8, 98}, {52, 4}})},
      {straight({{5, 0}, {55, 0}, {55, 100}, {5, 100}, {5, 0}}), straight({{5, 50}, {55, 50}})},
  };
}

std::vector<Glyph> nines() {
  const Stroke loop = smooth({{30, 0}, {9, 14}, {9, 38}, {30, 52}, {51, 38}, {51, 14}, {30, 0}});
  return {
      {loop, straight({{51, 22}, {49, 100}})},
      {loop, smooth({{51, 22}, {52, 58}, {40, 88}, {12, 98}})},
      {loop, straight({{50, 34}, {26, 100}})},
      {straight({{55, 50}, {5, 50}, {5, 0}, {55, 0}, {55, 100}, {5, 100}})},
  };
}

// Lower-case letters stand on y = 100 and reach up to y = 40; stems reach from 0 to 130.
std::map<char, Glyph> letters() {
  const Stroke bowl = smooth({{30, 40}, {12, 52}, {12, 88}, {30, 100}, {48, 88}, {48, 52}, {30, 40}});
  const Stroke arch = smooth({{10, 58}, {20, 43}, {36, 41}, {47, 52}, {48, 66}});
  const auto dot = [](int x, int y) { return straight({{x, y}, {x, y + 3}}); };
  const auto stem = [](int x, int top, int bottom) { return straight({{x, top}, {x, bottom}}); };
  return {
      {'a', {bowl, stem(48, 40, 100)}},
      {'b', {bowl, stem(12, 0, 100)}},
      {'c', {smooth({{47, 50}, {30, 40}, {12, 54}, {12, 86}, {30, 100}, {47, 90}})}},
      {'d', {bowl, stem(48, 0, 100)}},
      {'e', {smooth({{12, 70}, {48, 70}, {46, 50}, {30, 40}, {12, 54}, {12, 86}, {30, 100}, {46, 92}})}},
      {'f', {smooth({{44, 4}, {30, 3}, {24, 18}, {24, 40}}), stem(24, 40, 100), straight({{10, 42}, {42, 42}})}},
      {'g', {bowl, stem(48, 40, 112), smooth({{48, 112}, {40, 128}, {24, 131}, {12, 124}})}},
      {'h', {stem(10, 0, 100), arch, stem(48, 66, 100)}},
      {'i', {stem(20, 40, 100), dot(20, 14)}},
      {'j', {stem(24, 40, 114), smooth({{24, 114}, {18, 128}, {6, 130}}), dot(24, 14)}},
      {'k', {stem(12, 0, 100), straight({{46, 40}, {12, 76}}), straight({{24, 64}, {48, 100}})}},
      {'l', {stem(20, 0, 100)}},
      {'m',
       {stem(6, 40, 100), smooth({{6, 56}, {16, 42}, {28, 44}, {34, 60}}), stem(34, 60, 100),
        smooth({{34, 56}, {44, 42}, {56, 44}, {62, 60}}), stem(62, 60, 100)}},
      {'n', {stem(10, 40, 100), arch, stem(48, 66, 100)}},
      {'o', {bowl}},
      {'p', {bowl, stem(12, 40, 130)}},
      {'q', {bowl, stem(48, 40, 130)}},
      {'r', {stem(14, 40, 100), smooth({{14, 60}, {24, 45}, {40, 42}})}},
      {'s', {smooth({{46, 48}, {30, 40}, {14, 50}, {22, 66}, {40, 74}, {46, 88}, {30, 100}, {12, 92}})}},
      {'t', {stem(24, 14, 84), smooth({{24, 84}, {30, 98}, {44, 97}}), straight({{10, 42}, {42, 42}})}},
      {'u', {stem(12, 40, 76), smooth({{12, 76}, {16, 97}, {36, 98}, {48, 80}}), stem(48, 40, 100)}},
      {'v', {straight({{8, 40}, {29, 100}, {50, 40}})}},
      {'w', {straight({{4, 40}, {18, 100}, {32, 50}, {46, 100}, {60, 40}})}},
      {'x', {straight({{10, 40}, {48, 100}}), straight({{48, 40}, {10, 100}})}},
      {'y', {straight({{8, 40}, {29, 98}}), straight({{50, 40}, {20, 130}})}},
      {'z', {straight({{10, 40}, {48, 40}, {10, 100}, {48, 100}})}},
      {'.', {dot(20, 96)}},
      {',', {straight({{22, 96}, {16, 116}})}},
      {':', {dot(20, 50), dot(20, 96)}},
      {'-', {straight({{12, 66}, {42, 66}})}},
      {'%',
       {straight({{52, 4}, {14, 96}}), smooth({{16, 2}, {6, 16}, {16, 30}, {26, 16}, {16, 2}}),
        smooth({{50, 70}, {40, 84}, {50, 98}, {60, 84}, {50, 70}})}},
  };
}

std::map<char, Glyph> printed() {
  constexpr std::array<std::size_t, 10> kStyles{0, 1, 0, 0, 1, 0, 0, 0, 0, 1};  // of digit_glyphs()
  auto glyphs = letters();
  for (int digit = 0; digit < 10; ++digit) {
    glyphs[static_cast<char>('0' + digit)] = digit_glyphs(digit)[kStyles[static_cast<std::size_t>(digit)]];
  }
  return glyphs;
}

}  // namespace

const std::vector<Glyph>& digit_glyphs(int digit) {
  static const std::array<std::vector<Glyph>, 10> kGlyphs{zeros(), ones(),  twos(),   threes(), fours(),
                                                          fives(), sixes(), sevens(), eights(), nines()};
  return kGlyphs.at(static_cast<size_t>(digit));
}

const Glyph& print_glyph(char character) {
  static const auto kGlyphs = printed();
  static const Glyph kEmpty;
  const auto found = kGlyphs.find(character);
  return found == kGlyphs.end() ? kEmpty : found->second;
}

}  // namespace gpipe::examples
