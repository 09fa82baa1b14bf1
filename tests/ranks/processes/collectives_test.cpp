// Calls over ranks that train nothing.

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpipe/timeline.h"
#include "tests/gpipe/helpers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

GPipe make_pipe(int stages, const std::string& schedule, std::shared_ptr<Ranks> ranks) {
  Sequential model;
  for (int s = 0; s < stages; ++s) model->push_back(Linear(4, 4));
  return GPipe(model, Balance(stages, 1), GPipeOptions().chunks(4).schedule(schedule).ranks(std::move(ranks)));
}

/// Bytes of memory that this process uses.
std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t pages = 0;
  file >> pages >> pages;
  return pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

TEST(RanksCollectives, BytesAndTexts) {
  expect_job(3, [](const std::shared_ptr<Ranks>& ranks) {
    for (const std::string text : {"balance 1,2", "", "a\nb"}) {
      EXPECT_EQ(ranks->share(ranks->rank() == 0 ? text : "nothing"), text);
    }
    auto pipe = make_pipe(3, "gpipe", ranks);
    const auto rank = static_cast<std::size_t>(ranks->rank());
    for (const std::size_t size : {5, 1, 0, 1000000, 1000000, 3, 0}) {
      const auto bytes_of = [&](std::size_t r) { return std::string(size * r, static_cast<char>('a' + r)); };
      const auto all = pipe->gather(bytes_of(rank));
      if (rank != 0) EXPECT_THAT(all, IsEmpty());
      if (rank == 0) EXPECT_EQ(all, (std::vector<std::string>{bytes_of(0), bytes_of(1), bytes_of(2)}));
    }
    EXPECT_THAT([&] { pipe->gather("", rank == 2 ? "apples" : "pears"); },
                throws<std::runtime_error>("rank 2 calls gather of apples, but rank 0 calls gather of pears"));
    if (rank == 1) pipe->withdraw("no bytes today");
    if (rank != 1) {
      EXPECT_THAT([&] { pipe->gather(""); }, throws<std::runtime_error>("rank 1 refused the call: no bytes today"));
    }
  });
}

TEST(RanksCollectives, LargeMessagesLeaveNoMemory) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    auto pipe = make_pipe(2, "gpipe", ranks);
    constexpr std::size_t kLarge = std::size_t{300} << 20;
    pipe->gather("");
    const auto before = resident_bytes();
    {
      const auto all = pipe->gather(std::string(ranks->rank() == 0 ? 0 : kLarge, 'x'));
      if (ranks->rank() == 0) EXPECT_EQ(all.at(1).size(), kLarge);
    }
    pipe->largest(0);  // rank 0 has received all
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const auto kept = [&] { return resident_bytes() > before + kLarge / 4; };
    while (kept() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_FALSE(kept());
  });
}

TEST(RanksCollectives, Numbers) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    const auto rank = static_cast<std::uint64_t>(ranks->rank());
    auto pipe = make_pipe(4, "zb_v", ranks);  // rank 0 has the first and the last stage
    EXPECT_EQ(pipe->largest(3 * rank), 3);
    EXPECT_EQ(pipe->largest(3 - rank), 3);
    EXPECT_EQ(pipe->largest(0), 0);
    EXPECT_EQ(pipe->largest(rank == 0 ? 0 : ~std::uint64_t{0}), ~std::uint64_t{0});

    std::vector<double> own;
    for (const auto& parameter : pipe->named_parameters()) own.push_back(std::stoi(parameter.key()));  // its stage
    EXPECT_EQ(own.front(), rank);
    EXPECT_THAT(pipe->of_all_parameters(own), ElementsAre(0, 0, 1, 1, 2, 2, 3, 3));
    if (rank == 1) own.pop_back();
    if (rank == 1) {
      EXPECT_THAT([&] { pipe->of_all_parameters(own); }, throws<std::invalid_argument>("4, but there are 3"));
    } else {
      EXPECT_THAT([&] { pipe->of_all_parameters(own); }, throws<std::runtime_error>("rank 1 refused the call"));
    }
  });
}

TEST(RanksCollectives, SumsOverReplicas) {
  const auto body = [](const std::shared_ptr<Ranks>& ranks) {
    auto pipe = make_pipe(2, "gpipe", ranks);
    // In another order, or with the numbers of more ranks, the first sum would not be 0.
    const double large = std::vector<double>{1e16, 1, -1e16}[ranks->replica()];
    const double counts = ranks->rank() < 3 ? 1 : 100;
    EXPECT_THAT(pipe->sum_over_replicas({counts * large, counts}), ElementsAre(0, 3));
    EXPECT_THAT(pipe->sum_over_replicas({}), IsEmpty());
    EXPECT_THAT([&] { pipe->sum_over_replicas(std::vector<double>(ranks->rank() == 5 ? 2 : 1)); },
                throws<std::runtime_error>("rank 5 calls sum of 2 numbers over replicas, but rank 0 calls sum of 1"));
    EXPECT_THAT(pipe->sum_over_replicas({2}), ElementsAre(6));
  };
  expect_job(6, body, {.ranks = patient().replicas(3), .before = {}});
}

TEST(RanksCollectives, PartsOfReplicas) {
  const auto body = [](const std::shared_ptr<Ranks>& ranks) {
    for (const std::int64_t samples : {0, 1, 2, 3, 7, 12}) {
      std::int64_t next = 0;
      for (int r = 0; r < 3; ++r) {
        const auto [begin, end] = ranks->part(samples, r);
        EXPECT_EQ(begin, next);
        EXPECT_GE(end - begin, samples / 3);
        EXPECT_LE(end - begin, r == 2 ? samples / 3 : (samples + 2) / 3);
        if (r == 0) EXPECT_EQ(end - begin, (samples + 2) / 3);
        if (r == ranks->replica()) EXPECT_EQ(ranks->part(samples), std::pair(begin, end));
        next = end;
      }
      EXPECT_EQ(next, samples);
    }
  };
  expect_job(3, body, {.ranks = patient().replicas(3), .before = {}});
}

TEST(RanksCollectives, ARankFailsBeforeItsText) {
  const auto ends = run_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    if (ranks->rank() == 0) throw std::runtime_error("no plan");
    ranks->share("");
  });
  EXPECT_EQ(ends[1].status, 2);
  EXPECT_THAT(ends[1].output, ::testing::HasSubstr("rank 0 ended with an exception outside of the pipeline"));
}

TEST(RanksCollectives, InOneProcess) {
  auto pipe = make_pipe(2, "gpipe", nullptr);
  EXPECT_THAT(pipe->gather("bytes"), ElementsAre("bytes"));
  EXPECT_EQ(pipe->largest(7), 7);
  EXPECT_THAT(pipe->sum_over_replicas({1, 2}), ElementsAre(1, 2));
  EXPECT_THAT(pipe->of_all_parameters({1, 2, 3, 4}), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT([&] { pipe->of_all_parameters({1}); }, throws<std::invalid_argument>("4, but there are 1"));
  Timeline timeline;
  timeline.workers = 2;
  timeline.spans.resize(3);
  EXPECT_EQ(pipe->gather(timeline).spans.size(), 3);
}

TEST(RanksCollectives, TimelinesOfAllRanks) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    auto pipe = make_pipe(4, "1f1b", ranks);
    const auto timeline = std::make_shared<Timeline>();
    pipe->trace(timeline);
    for (int step = 0; step < 2; ++step) {
      pipe->step(torch::ones({8, 4}), torch::ones({8, 4}),
                 tensor_loss([](const Tensor& out, const Tensor& t) { return torch::mse_loss(out, t); }));
    }
    const auto all = pipe->gather(*timeline);
    if (ranks->rank() != 0) {
      EXPECT_THAT(all.spans, IsEmpty());
      return;
    }
    EXPECT_EQ(all.workers, 4);
    EXPECT_EQ(all.edges.size(), 3);
    std::map<std::tuple<int, int, int, Kind>, Span> spans;
    for (const auto& span : all.spans) {
      spans[{span.step, span.action.stage, span.action.micro_batch, span.action.kind}] = span;
    }
    EXPECT_EQ(spans.size(), all.spans.size());
    // The ranks have one clock: an action ends before the next stage's begins.
    for (int step = 0; step < 2; ++step) {
      for (int i = 0; i < 4; ++i) {
        for (int s = 0; s < 3; ++s) {
          EXPECT_LE(spans.at({step, s, i, Kind::F}).end, spans.at({step, s + 1, i, Kind::F}).start);
          EXPECT_LE(spans.at({step, s + 1, i, Kind::B}).end, spans.at({step, s, i, Kind::B}).start);
        }
      }
    }
  });
}

}  // namespace
}  // namespace gpipe
