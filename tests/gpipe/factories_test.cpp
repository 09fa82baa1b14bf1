// A model that is given as factories of its layers. Some generated cases are.
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

LayerFactories five_layers() {
  return {{"first", [] { return Linear(4, 4); }},
          [] { return nn::Tanh(); },
          {"norm", [] { return nn::AnyModule(nn::BatchNorm1d(4)); }},
          [] { return std::make_shared<nn::LinearImpl>(4, 4); },
          {"last", [] { return make_layer("last", nn::AnyModule(Linear(4, 2))); }}};
}

TEST(Factories, EachLayerHasItsNameAndARandomScope) {
  for (const auto& balance : {Balance{5}, Balance{2, 3}, Balance{1, 1, 1, 1, 1}}) {
    torch::manual_seed(5);
    const GPipe pipe(five_layers(), balance, in_chunks(2));
    const auto generator = generator_state();

    torch::manual_seed(5);
    const auto seed = RandomScope::draw_seed();
    std::vector<Tensor> expected;
    const auto add = [&](std::int64_t index, auto make) {
      const RandomScope scope(seed, index, 0);
      for (const auto& parameter : make()->parameters()) expected.push_back(parameter);
    };
    add(0, [] { return Linear(4, 4); });
    add(2, [] { return nn::BatchNorm1d(4); });
    add(3, [] { return Linear(4, 4); });
    add(4, [] { return Linear(4, 2); });
    EXPECT_TRUE(same(pipe->parameters(), expected));
    EXPECT_TRUE(same(generator, generator_state()));
    EXPECT_THAT(pipe->named_children().keys(), ElementsAre("first", "1", "norm", "3", "last"));
    EXPECT_EQ(pipe->parameter_names().front().name, "first.weight");
    EXPECT_EQ(pipe->buffer_names().front().name, "norm.running_mean");
  }
}

TEST(Factories, LayersAreChecked) {
  const auto second = [](auto factory) {
    return [=] { GPipe(LayerFactories{[] { return Linear(2, 2); }, {"it", factory}}, Balance{1, 1}); };
  };
  const auto has_no_module = refused("the factory of layer 'it' returned no module");
  EXPECT_THAT(second([] { return Linear(nullptr); }), has_no_module);
  EXPECT_THAT(second([] { return nn::AnyModule(); }), has_no_module);
  EXPECT_THAT(second([] { return std::shared_ptr<nn::LinearImpl>(); }), has_no_module);
  EXPECT_THAT(second([] { return std::unique_ptr<Layer>(); }), has_no_module);
  EXPECT_THAT(second([] { return Pop("a"); }), refused("layer 'it' (1) pops 'a'"));
  const Linear one(2, 2);
  const LayerFactories twice(2, [=] { return one; });
  EXPECT_THAT([&] { GPipe(twice, Balance{2}); }, refused("layers '0' and '1' are the same module"));
}

TEST(Factories, AnErrorOfAFactoryIsThrown) {
  int calls = 0;
  const auto good = [&calls] {
    ++calls;
    return Linear(2, 2);
  };
  const auto throwing = [&](LayerFactory factory) {
    return [&, factory = std::move(factory)] { GPipe(LayerFactories{good, factory, good}, Balance{2, 1}); };
  };
  EXPECT_THAT(throwing([]() -> Linear { throw std::domain_error("injected"); }), throws<std::domain_error>("injected"));
  EXPECT_EQ(calls, 1);
  EXPECT_THAT(throwing({"wrong", [] { return Linear(-1, 2); }}), throws<c10::Error>("in the factory of layer 'wrong'"));
}

}  // namespace
}  // namespace gpipe
