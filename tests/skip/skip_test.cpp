#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "skip/context.h"
#include "skip/layout.h"
#include "skip/namespace.h"
#include "skip/skippable.h"

namespace gpipe {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

/// Stashes its input under some names, runs nested layers, then adds the tensors that it pops under other names.
class SkipLayer : public torch::nn::Module, public Skippable {
 public:
  explicit SkipLayer(Names names) : Skippable(names), names_(std::move(names)) {}

  SkipLayer& nest(const std::string& name, std::shared_ptr<SkipLayer> child) {
    children_.push_back(register_module(name, std::move(child)));
    return *this;
  }

  torch::Tensor forward(torch::Tensor x) {
    for (const auto& name : names_.stash) stash(name, x);
    for (const auto& child : children_) x = child->forward(x);
    for (const auto& name : names_.pop) x = x + pop(name);
    return x;
  }

  using Skippable::pop;
  using Skippable::stash;

 private:
  Names names_;
  std::vector<std::shared_ptr<SkipLayer>> children_;
};

std::shared_ptr<SkipLayer> stashing(const std::string& name) {
  return std::make_shared<SkipLayer>(Skippable::Names{.stash = {name}});
}
std::shared_ptr<SkipLayer> popping(const std::string& name) {
  return std::make_shared<SkipLayer>(Skippable::Names{.pop = {name}});
}
std::shared_ptr<SkipLayer> plain() { return std::make_shared<SkipLayer>(Skippable::Names{}); }

using Links = std::vector<std::tuple<std::string, int, int>>;

Links links_of(const std::vector<NamedLayer>& layers) {
  Links links;
  for (const auto& link : skip_links(layers)) links.emplace_back(link.key.name, link.from, link.to);
  return links;
}

TEST(Namespace, NewOnesDifferAndCopiesAreEqual) {
  const Namespace a;
  const Namespace b;
  const Namespace copy = a;
  EXPECT_NE(a, b);
  EXPECT_EQ(a, copy);
  EXPECT_NE(a, Namespace::global());
  EXPECT_EQ(Namespace::global(), Namespace::global());
}

TEST(SkipKey, TextIncludesTheNamespaceOfIsolatedNames) {
  EXPECT_EQ(to_string(SkipKey{.name = "x"}), "'x'");
  const Namespace ns;
  EXPECT_EQ(to_string(SkipKey{ns, "x"}), "'x' (namespace " + std::to_string(ns.id()) + ")");
}

TEST(SkipContext, PopsATensorOnce) {
  const SkipKey key{.name = "once"};
  const auto tensor = torch::ones({2});
  SkipContext::current().stash(key, tensor);
  EXPECT_TRUE(SkipContext::current().pop(key).is_same(tensor));
  EXPECT_THAT([&] { SkipContext::current().pop(key); },
              ThrowsMessage<std::runtime_error>("skip 'once' was popped before it was stashed"));
}

TEST(SkipContext, SecondStashReplacesTheFirst) {
  const SkipKey key{.name = "again"};
  SkipContext::current().stash(key, torch::ones({2}));
  const auto second = torch::zeros({2});
  SkipContext::current().stash(key, second);
  EXPECT_TRUE(SkipContext::current().pop(key).is_same(second));
}

TEST(SkipContext, AcceptsUndefinedTensorsAndDistinguishesNamespaces) {
  const SkipKey global{.name = "maybe"};
  const SkipKey isolated{Namespace(), "maybe"};
  SkipContext::current().stash(global, at::Tensor());
  SkipContext::current().stash(isolated, torch::ones({1}, torch::kLong));
  EXPECT_FALSE(SkipContext::current().pop(global).defined());
  EXPECT_EQ(SkipContext::current().pop(isolated).scalar_type(), torch::kLong);
}

TEST(SkipContext, EachThreadHasItsOwn) {
  const SkipKey key{.name = "here"};
  SkipContext::current().stash(key, torch::ones({1}));
  std::thread([&] { EXPECT_THROW(SkipContext::current().pop(key), std::runtime_error); }).join();
  EXPECT_TRUE(SkipContext::current().pop(key).defined());
}

/// Records the calls of stash() and pop().
class Recorder : public SkipContext {
 public:
  void stash(const SkipKey& key, at::Tensor) override { log.push_back("stash " + to_string(key)); }
  at::Tensor pop(const SkipKey& key) override {
    log.push_back("pop " + to_string(key));
    return torch::ones({1});
  }

  std::vector<std::string> log;
};

TEST(SkipContextGuard, SetsTheContextAndNests) {
  const auto& own = SkipContext::current();
  const auto stash = stashing("x");
  const auto pop = popping("x");
  Recorder outer;
  Recorder inner;
  {
    const SkipContextGuard outer_guard(outer);
    stash->forward(torch::ones({1}));
    {
      const SkipContextGuard inner_guard(inner);
      pop->forward(torch::ones({1}));
    }
    EXPECT_EQ(&SkipContext::current(), &outer);
    std::thread([&] { EXPECT_NE(&SkipContext::current(), &outer); }).join();
  }
  EXPECT_EQ(&SkipContext::current(), &own);
  EXPECT_THAT(outer.log, testing::ElementsAre("stash 'x'"));
  EXPECT_THAT(inner.log, testing::ElementsAre("pop 'x'"));
}

TEST(Skippable, WorksInAPlainSequential) {
  torch::nn::Sequential model{stashing("a"), stashing("b"), torch::nn::Linear(3, 3), popping("a"), popping("b")};
  const auto x = torch::rand({2, 3}, torch::requires_grad());
  const auto y = model->forward(x);
  EXPECT_TRUE(torch::allclose(y, model[2]->as<torch::nn::LinearImpl>()->forward(x) + 2 * x));
  y.sum().backward();
  const auto weight = model[2]->as<torch::nn::LinearImpl>()->weight;
  EXPECT_TRUE(torch::allclose(x.grad(), (weight.sum(0) + 2).expand({2, 3})));
}

TEST(Skippable, RefusesInvalidDeclarations) {
  EXPECT_THAT([] { stashing(""); }, ThrowsMessage<std::invalid_argument>(HasSubstr("empty name")));
  EXPECT_THAT([] { SkipLayer({.stash = {"x", "y", "x"}}); }, ThrowsMessage<std::invalid_argument>(HasSubstr("'x'")));
  EXPECT_THAT(
      [] {
        SkipLayer({.stash = {"y"}, .pop = {"x", "y"}});
      },
      ThrowsMessage<std::invalid_argument>(HasSubstr("'y'")));
}

TEST(Skippable, RefusesUndeclaredNames) {
  SkipLayer layer({.stash = {"a", "b"}});
  EXPECT_THAT(
      [&] { layer.stash("c", torch::ones({1})); },
      ThrowsMessage<std::invalid_argument>("'c' was stashed by a layer that does not declare it; it declares 'a' 'b'"));
  EXPECT_THAT([&] { layer.pop("a"); }, ThrowsMessage<std::invalid_argument>(
                                           "'a' was popped by a layer that does not declare it; it declares none"));
}

TEST(Isolate, AllowsTheSameLayersTwiceInOneModel) {
  torch::nn::Sequential model{stashing("x"), stashing("x"), popping("x"), popping("x")};
  EXPECT_THROW(verify_skippables(model), std::invalid_argument);
  const Namespace ns;
  for (const int i : {1, 2}) model[i]->as<SkipLayer>()->isolate(ns);
  EXPECT_NO_THROW(verify_skippables(model));
  EXPECT_TRUE(torch::equal(model->forward(torch::ones({2})), torch::full({2}, 3)));
}

TEST(Isolate, MovesNamesOfNestedLayersAndOnlyTheGivenOnes) {
  const auto inner = std::make_shared<SkipLayer>(Skippable::Names{.stash = {"x", "y"}});
  const auto outer = popping("x");
  outer->nest("inner", inner);
  const Namespace ns;
  outer->isolate(ns, {"x"});
  EXPECT_EQ(outer->pops(), (std::vector<SkipKey>{{ns, "x"}}));
  EXPECT_EQ(inner->stashes(), (std::vector<SkipKey>{{ns, "x"}, {.name = "y"}}));
  const Namespace other;
  isolate(*outer, other);
  EXPECT_EQ(outer->pops(), (std::vector<SkipKey>{{other, "x"}}));
  EXPECT_EQ(inner->stashes(), (std::vector<SkipKey>{{other, "x"}, {other, "y"}}));
}

TEST(Isolate, RefusesUnknownNamesAndMovesNothing) {
  const auto layer = stashing("x");
  EXPECT_THAT([&] { layer->isolate(Namespace(), {"x", "z"}); }, ThrowsMessage<std::invalid_argument>(HasSubstr("'z'")));
  EXPECT_EQ(layer->stashes(), (std::vector<SkipKey>{{.name = "x"}}));
}

TEST(SkipLinks, AreInTheOrderOfStashes) {
  EXPECT_EQ(
      links_of({{"a", stashing("z")}, {"b", stashing("y")}, {"c", plain()}, {"d", popping("y")}, {"e", popping("z")}}),
      (Links{{"z", 0, 4}, {"y", 1, 3}}));
}

TEST(SkipLinks, NestedLayersCountAsTheirOuterLayer) {
  const auto encoder = plain();
  encoder->nest("deep", stashing("x"));
  const auto decoder = plain();
  decoder->nest("first", stashing("y")).nest("second", popping("x")).nest("third", popping("y"));
  EXPECT_EQ(links_of({{"encoder", encoder}, {"decoder", decoder}}), (Links{{"x", 0, 1}, {"y", 1, 1}}));
}

TEST(SkipLinks, ALayerCanPopASkipOfItsChild) {
  const auto outer = popping("x");
  outer->nest("child", stashing("x"));
  EXPECT_EQ(links_of({{"outer", outer}}), (Links{{"x", 0, 0}}));
  EXPECT_TRUE(torch::equal(outer->forward(torch::ones({1})), torch::full({1}, 2)));
}

TEST(SkipLinks, RefuseAPopBeforeItsStashInOneLayer) {
  const auto outer = plain();
  outer->nest("a", popping("x")).nest("ab", stashing("x"));
  EXPECT_THAT(
      [&] {
        skip_links({{"outer", outer}});
      },
      ThrowsMessage<std::invalid_argument>(
          HasSubstr("layer 'outer.a' (0) pops 'x', which no earlier layer stashes: layer 'outer.ab' (0) does")));
}

TEST(VerifySkippables, NamesTheLayerThatPopsWithoutAStash) {
  torch::nn::Sequential model;
  for (const auto* name : {"enc1", "enc2", "enc3"}) model->push_back(name, plain());
  model->push_back("dec1", popping("x"));
  EXPECT_THAT([&] { verify_skippables(model); },
              ThrowsMessage<std::invalid_argument>("one or more pairs of stash and pop do not match:\n"
                                                   "  * layer 'dec1' (3) pops 'x', which no earlier layer stashes"));
}

TEST(VerifySkippables, ListsAllFaultsInOneError) {
  torch::nn::Sequential model;
  model->push_back("early", popping("late"));
  model->push_back("one", stashing("twice"));
  model->push_back("two", stashing("twice"));
  model->push_back("three", popping("twice"));
  model->push_back("four", popping("twice"));
  model->push_back("lost", stashing("never"));
  model->push_back("late", stashing("late"));
  model->push_back("good", stashing("fine"));
  model->push_back("fine", popping("fine"));
  EXPECT_THAT(
      [&] { verify_skippables(model); },
      ThrowsMessage<std::invalid_argument>(AllOf(
          HasSubstr(
              "\n  * layer 'two' (2) stashes 'twice', which layer 'one' (1) already stashes: isolate one of them"),
          HasSubstr("\n  * layer 'four' (4) pops 'twice', which layer 'three' (3) already pops: isolate one of them"),
          HasSubstr("\n  * layer 'lost' (5) stashes 'never', which no layer pops"),
          HasSubstr("\n  * layer 'early' (0) pops 'late', which no earlier layer stashes: layer 'late' (6) does"),
          Not(HasSubstr("fine")))));
}

TEST(VerifySkippables, DoesNotMatchNamesInDifferentNamespaces) {
  torch::nn::Sequential model{stashing("x"), popping("x")};
  const Namespace ns;
  model[1]->as<SkipLayer>()->isolate(ns);
  EXPECT_THAT([&] { verify_skippables(model); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("stashes 'x', which no layer pops"),
                        HasSubstr("pops 'x' (namespace " + std::to_string(ns.id()) + "), which no earlier layer"))));
}

}  // namespace
}  // namespace gpipe
