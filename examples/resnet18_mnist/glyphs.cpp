#include "examples/resnet18_mnist/glyphs.h"

#include <array>
#include <cstddef>
#include <utility>

namespace gpipe::examples::mnist {
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

}  // namespace

const std::vector<Glyph>& glyphs(int digit) {
  static const std::array<std::vector<Glyph>, 10> kGlyphs{zeros(), ones(),  twos(),   threes(), fours(),
                                                          fives(), sixes(), sevens(), eights(), nines()};
  return kGlyphs.at(static_cast<size_t>(digit));
}

}  // namespace gpipe::examples::mnist
