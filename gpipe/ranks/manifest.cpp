#include "gpipe/ranks/manifest.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "gpipe/base/bytes.h"

namespace gpipe {
namespace {

constexpr std::chrono::milliseconds kAwaitInterval{20};

std::string to_text(const Manifest& manifest) {
  ByteWriter text;
  for (const auto& [name, value] : manifest) text.add(name, value);
  return text.take();
}

Manifest to_manifest(const std::string& text) {
  Manifest manifest;
  for (ByteReader words(text); !words.done();) manifest.push_back({words.get<std::string>(), words.get<std::string>()});
  return manifest;
}

std::string key_of(int rank) { return "manifest/" + std::to_string(rank); }

std::string in_seconds(std::chrono::milliseconds time) {
  auto text = std::to_string(static_cast<double>(time.count()) / 1000);
  text.erase(text.find('.') + 2);
  return text + " s";
}

// Rank 0's decision on all manifests; empty if they agree.
std::string decide(c10d::Store& store, int size, const Manifest& mine, std::chrono::milliseconds limit,
                   const std::function<void()>& poll) {
  const auto end = std::chrono::steady_clock::now() + limit;
  std::string missing;
  int absent = 0;
  std::string difference;
  for (int r = 1; r < size; ++r) {
    const auto text = await_value(store, key_of(r), end, poll);
    if (text.empty()) {
      missing += (absent++ == 0 ? "" : ", ") + std::to_string(r);
    } else if (difference.empty()) {
      difference = compare(mine, 0, to_manifest(text), r);
    }
  }
  if (absent == 0) return difference;
  return (absent == 1 ? "rank " : "ranks ") + missing + " of " + std::to_string(size) + " did not come within " +
         in_seconds(limit);
}

}  // namespace

std::string await_value(c10d::Store& store, const std::string& key, std::chrono::steady_clock::time_point end,
                        const std::function<void()>& poll) {
  while (!store.check({key})) {
    if (std::chrono::steady_clock::now() >= end) return "";
    if (poll) poll();
    std::this_thread::sleep_for(kAwaitInterval);
  }
  return store.get_to_str(key);
}

std::string compare(const Manifest& first, int first_rank, const Manifest& second, int second_rank) {
  const auto value_of = [](const Manifest& manifest, const std::string& name) -> std::string {
    const auto found =
        std::find_if(manifest.begin(), manifest.end(), [&](const auto& entry) { return entry.first == name; });
    return found == manifest.end() ? "nothing" : found->second;
  };
  for (const auto* manifest : {&first, &second}) {
    for (const auto& [name, value] : *manifest) {
      const auto a = value_of(first, name);
      const auto b = value_of(second, name);
      if (a == b || a.empty() || b.empty()) continue;
      return "the ranks differ in " + name + ": rank " + std::to_string(first_rank) + " has " + a + ", but rank " +
             std::to_string(second_rank) + " has " + b;
    }
  }
  return "";
}

void check_manifests(c10d::Store& store, int rank, int size, const Manifest& manifest, std::chrono::milliseconds limit,
                     const std::function<void()>& poll) {
  const std::string agreed = "agreed";
  std::string decision;
  if (rank == 0) {
    decision = decide(store, size, manifest, limit, poll);
    if (decision.empty()) decision = agreed;
    store.set("decision", decision);
  } else {
    store.set(key_of(rank), to_text(manifest));
    // Rank 0 may have begun to wait later than this rank.
    decision = await_value(store, "decision", std::chrono::steady_clock::now() + 2 * limit, poll);
    if (decision.empty())
      decision = "rank 0 of " + std::to_string(size) + " did not come within " + in_seconds(2 * limit);
  }
  if (decision != agreed) throw std::runtime_error("[gpipe] the ranks cannot make the pipeline: " + decision);
}

}  // namespace gpipe
