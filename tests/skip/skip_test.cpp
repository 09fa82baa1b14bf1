#include "skip/layout.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

std::shared_ptr<StashImpl> stashing(const std::string& name) { return std::make_shared<StashImpl>(name, 1); }
std::shared_ptr<PopImpl> popping(const std::string& name) {
  return std::make_shared<PopImpl>(name, [](Tensor x, Tensor skip) { return x + skip; });
}

/// A layer that only declares names.
std::shared_ptr<SkipFunctionImpl> declaring(Skippable::Names names) {
  return std::make_shared<SkipFunctionImpl>(std::move(names), [](Tensor x, SkipFunctionImpl&) { return x; });
}

using Links = std::vector<std::tuple<std::string, int, std::vector<int>>>;

Links links_of(const std::vector<NamedLayer>& layers) {
  Links links;
  for (const auto& link : skip_links(layers)) links.emplace_back(link.key.name, link.from, link.readers);
  return links;
}

TEST(SkipContext, PopsTheLastTensorThatTheThreadHasStashed) {
  const SkipKey key{.name = "once"};
  const SkipKey isolated{Namespace(), "once"};
  const auto tensor = torch::ones({2});
  for (const auto& each : {torch::zeros({2}), tensor}) SkipContext::current().stash(key, each);
  SkipContext::current().stash(isolated, Tensor());
  std::thread([&] { EXPECT_THROW(SkipContext::current().pop(key), std::runtime_error); }).join();
  EXPECT_TRUE(SkipContext::current().peek(key).is_same(tensor));
  EXPECT_TRUE(SkipContext::current().pop(key).is_same(tensor));
  EXPECT_FALSE(SkipContext::current().pop(isolated).defined());
  EXPECT_THAT([&] { SkipContext::current().pop(key); },
              throws<std::runtime_error>("skip 'once' was read before it was stashed"));
}

TEST(Skippable, RefusesInvalidAndMissingDeclarations) {
  EXPECT_THAT([] { stashing(""); }, refused("empty name"));
  EXPECT_THAT([] { declaring({.stash = {"x", "y", "x"}}); }, refused("'x'"));
  EXPECT_THAT([] { declaring({.stash = {"y"}, .pop = {"x", "y"}}); }, refused("'y'"));
  EXPECT_THAT([] { declaring({.pop = {"x"}, .peek = {"x"}}); }, refused("'x'"));
  const auto layer = declaring({.stash = {"a", "b"}});
  EXPECT_THAT([&] { layer->stash("c", torch::ones({1})); },
              refused("'c' was stashed by a layer that does not declare it; it declares 'a' 'b'"));
  EXPECT_THAT([&] { layer->pop("a"); },
              refused("'a' was popped by a layer that does not declare it; it declares none"));
}

TEST(Isolate, MovesNamesOfNestedLayersAndOnlyTheGivenOnes) {
  const auto inner = declaring({.stash = {"x", "y"}});
  const auto outer = popping("x");
  outer->register_module("inner", inner);
  const Namespace ns;
  outer->isolate(ns, {"x"});
  EXPECT_EQ(outer->pops(), (std::vector<SkipKey>{{ns, "x"}}));
  EXPECT_EQ(inner->stashes(), (std::vector<SkipKey>{{ns, "x"}, {.name = "y"}}));
  EXPECT_THAT([&] { outer->isolate(Namespace(), {"x", "z"}); }, refused("'z'"));
  EXPECT_EQ(outer->pops(), (std::vector<SkipKey>{{ns, "x"}}));
  const Namespace other;
  isolate(*outer, other);
  EXPECT_EQ(outer->pops(), (std::vector<SkipKey>{{other, "x"}}));
  EXPECT_EQ(inner->stashes(), (std::vector<SkipKey>{{other, "x"}, {other, "y"}}));
}

TEST(SkipLinks, AreInTheOrderOfStashesAndHaveAnyNumberOfReaders) {
  const NestedSequential twice{{"a", Peek("x")}, {"b", Peek("x")}};
  EXPECT_EQ(links_of({{"a", stashing("x")}, {"b", Peek("x").ptr()}, {"c", twice.ptr()}}), (Links{{"x", 0, {1, 2, 2}}}));
  const NestedSequential encoder{{"deep", stashing("x")}, {"next", stashing("z")}};
  const NestedSequential decoder{{"first", stashing("y")}, {"second", popping("x")}, {"third", popping("y")}};
  EXPECT_EQ(links_of({{"a", encoder.ptr()}, {"b", Peek("x").ptr()}, {"c", decoder.ptr()}, {"d", popping("z")}}),
            (Links{{"x", 0, {1, 2}}, {"z", 0, {3}}, {"y", 2, {2}}}));
  const NestedSequential early{{"a", popping("x")}, {"ab", stashing("x")}};
  const std::vector<NamedLayer> layers = {{"outer", early.ptr()}};
  EXPECT_THAT([&] { links_of(layers); },
              refused("layer 'outer.a' (0) pops 'x', which no earlier layer stashes: layer 'outer.ab' (0) does"));
}

TEST(VerifySkippables, ListsAllFaultsInOneError) {
  Sequential model({{"early", popping("late")},
                    {"one", stashing("twice")},
                    {"two", stashing("twice")},
                    {"three", popping("twice")},
                    {"four", popping("twice")},
                    {"lost", stashing("never")},
                    {"late", stashing("late")},
                    {"good", stashing("fine")},
                    {"fine", popping("fine")},
                    {"after", Peek("fine")},
                    {"last", popping("nowhere")}});
  const auto line = [](const std::string& fault) { return HasSubstr("\n  * layer " + fault); };
  EXPECT_THAT(
      [&] { verify_skippables(model); },
      ThrowsMessage<std::invalid_argument>(AllOf(
          testing::StartsWith("one or more pairs of stash and pop do not match:\n"),
          line("'two' (2) stashes 'twice', which layer 'one' (1) already stashes: isolate one of them"),
          line("'four' (4) pops 'twice', which layer 'three' (3) already pops: isolate one of them"),
          line("'lost' (5) stashes 'never', which no layer pops"),
          line("'early' (0) pops 'late', which no earlier layer stashes: layer 'late' (6) does"),
          line("'after' (9) peeks at 'fine', which layer 'fine' (8) has popped: let the last reader pop"),
          line("'last' (10) pops 'nowhere', which no earlier layer stashes"), testing::Not(HasSubstr("'good'")))));
}

TEST(VerifySkippables, MatchesNamesWithinNamespaces) {
  Sequential model{stashing("x"), stashing("x"), popping("x"), popping("x")};
  EXPECT_THROW(verify_skippables(model), std::invalid_argument);
  const Namespace ns;
  model[1]->as<SkipFunctionImpl>()->isolate(ns);
  EXPECT_THAT([&] { verify_skippables(model); }, refused("stashes 'x' (namespace " + std::to_string(ns.id()) + ")"));
  model[2]->as<SkipFunctionImpl>()->isolate(ns);
  EXPECT_NO_THROW(verify_skippables(model));
  EXPECT_TRUE(torch::equal(model->forward(torch::ones({2})), torch::full({2}, 3)));
}

}  // namespace
}  // namespace gpipe
