#include <caffe2/serialize/inline_container.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpipe/snapshot/archive.h"
#include "gpipe/snapshot/atomic_file.h"
#include "gpipe/snapshot/snapshot.h"
#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class DamageTest : public testing::Test {
 protected:
  std::string refusal() {
    return error_of([&] { read_snapshot(path_); });
  }
  std::string refusal_of(std::string_view bytes) {
    write_bytes(path_, bytes);
    return refusal();
  }

  TemporaryDirectory folder_;
  const std::filesystem::path path_ = folder_ / "latest";
};

TEST_F(DamageTest, EveryCutIsRefused) {
  write_snapshot(path_, small_snapshot());
  const auto whole = bytes_of(path_);
  for (std::size_t size = 0; size < whole.size(); size += size < whole.size() - 300 ? 13 : 1) {
    const auto error = refusal_of(whole.substr(0, size));
    ASSERT_THAT(error, AllOf(HasSubstr(path_.string()), HasSubstr(size < 4 ? "no snapshot" : "cut short"))) << size;
  }
  EXPECT_THAT(refusal_of(whole + "more"), HasSubstr("damaged"));
  EXPECT_THAT(refusal_of(whole.substr(0, 2000) + whole.substr(2001)), HasSubstr("damaged"));
  EXPECT_EQ(refusal_of(whole), "");
}

TEST_F(DamageTest, AFlippedBitIsRefusedOrDoesNotMatter) {
  const auto snapshot = small_snapshot();
  write_snapshot(path_, snapshot);
  const auto whole = bytes_of(path_);
  std::size_t refused = 0;
  for (std::size_t at = 0; at < whole.size(); at += 3) {
    auto damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 1 << at % 8);
    write_bytes(path_, damaged);
    try {
      ASSERT_TRUE(same(read_snapshot(path_), snapshot)) << "byte " << at << " of " << whole.size();
    } catch (const std::runtime_error&) {
      ++refused;
    }
  }
  // The rest is padding, times of day, and what the zip format says twice.
  EXPECT_GT(refused, (5056u + 500u) / 3);
}

TEST_F(DamageTest, WhatIsNoSnapshotIsRefused) {
  EXPECT_THAT(refusal(), AllOf(HasSubstr(path_.string()), HasSubstr("No such file")));
  EXPECT_THAT(refusal_of(""), HasSubstr("no snapshot"));
  EXPECT_THAT(refusal_of("epoch,loss\n1,0.5\n"), HasSubstr("no zip file"));
  EXPECT_THAT(error_of([&] { read_snapshot(path_.parent_path()); }), HasSubstr("directory"));

  torch::save(small_model(), path_.string());
  EXPECT_THAT(refusal(), HasSubstr("TorchScript"));
  torch::save(torch::ones({3}), path_.string());
  EXPECT_THAT(refusal(), HasSubstr("it holds TorchScript"));
  const auto pickled = torch::pickle_save(c10::Dict<std::string, at::Tensor>());
  EXPECT_THAT(refusal_of({pickled.data(), pickled.size()}), HasSubstr("something else that torch saved"));
  write_archive(path_, torch::ones({3}));
  EXPECT_THAT(refusal(), HasSubstr("something else that torch saved"));
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  dict.insert(1, 2);
  write_archive(path_, dict);
  EXPECT_THAT(refusal(), HasSubstr("something else that torch saved"));
  dict.insert("format", "another snapshot");
  write_archive(path_, dict);
  EXPECT_THAT(refusal(), HasSubstr("something else that torch saved"));
}

TEST_F(DamageTest, OtherContentsAreRefused) {
  const auto changed = [&](const std::function<void(c10::impl::GenericDict&)>& change) {
    write_snapshot(path_, small_snapshot());
    auto dict = read_archive(path_).toGenericDict();
    change(dict);
    write_archive(path_, dict);
    return refusal();
  };
  EXPECT_EQ(changed([](auto&) {}), "");
  EXPECT_EQ(changed([](auto& dict) { dict.insert("mine", 1); }), "");
  EXPECT_THAT(changed([](auto& dict) { dict.insert_or_assign("version", 2); }),
              AllOf(HasSubstr("version is 2"), HasSubstr("newer")));
  for (const auto* key : {"version", "model", "optimizer", "epoch", "position", "random", "options", "history"}) {
    EXPECT_THAT(changed([&](auto& dict) { static_cast<void>(dict.erase(key)); }),
                HasSubstr("no '" + std::string(key) + "'"));
    EXPECT_THAT(changed([&](auto& dict) { dict.insert_or_assign(key, true); }),
                HasSubstr("'" + std::string(key) + "'"));
  }
}

/// A file in torch's form with the given pickle and one storage.
std::string archive_of(const std::string& pickle, const std::string& storage) {
  std::string bytes;
  {
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
      bytes.append(static_cast<const char*>(data), size);
      return size;
    });
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeRecord("data/0", storage.data(), storage.size());
    writer.writeEndOfFile();
  }
  return bytes;
}

TEST_F(DamageTest, NothingIsExecuted) {
  const auto touched = folder_ / "touched";
  const auto command = "touch '" + touched.string() + "'";
  auto pickle = std::string("\x80\x02") + "cos\nsystem\nX";
  pickle += {static_cast<char>(command.size()), 0, 0, 0};
  pickle += command + "\x85R.";
  EXPECT_THAT(refusal_of(archive_of(pickle, "")), HasSubstr("os.system"));
  EXPECT_FALSE(std::filesystem::exists(touched));
}

TEST_F(DamageTest, ATensorStaysInItsRecord) {
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* data, std::size_t size) { pickle.append(data, size); });
  pickler.protocol();
  pickler.pushIValue(torch::ones({8}));
  pickler.stop();
  EXPECT_THAT(refusal_of(archive_of(pickle, std::string(32, '1'))), HasSubstr("something else that torch saved"));
  EXPECT_THAT(refusal_of(archive_of(pickle, std::string(28, '1'))), HasSubstr("larger than its record"));
}

TEST(AtomicFileTest, TheOldFileStaysUntilTheNewOneIsThere) {
  const TemporaryDirectory folder;
  const auto path = folder / "file";
  write_bytes(path, "old");
  {
    AtomicFile abandoned(path);
    abandoned.write("new", 3);
  }
  EXPECT_EQ(bytes_of(path), "old");
  EXPECT_FALSE(std::filesystem::exists(folder / "file.tmp"));

  write_bytes(folder / "file.tmp", "what a killed writer left");
  AtomicFile file(path);
  file.write("n", 1);
  file.write("ew", 2);
  EXPECT_EQ(bytes_of(path), "old");
  file.commit();
  EXPECT_EQ(bytes_of(path), "new");
  EXPECT_FALSE(std::filesystem::exists(folder / "file.tmp"));
}

TEST(AtomicFileTest, ASecondWriterIsRefused) {
  const TemporaryDirectory folder;
  const auto path = folder / "file";
  AtomicFile first(path);
  first.write("first", 5);
  EXPECT_THAT(error_of([&] { AtomicFile second(path); }), HasSubstr("somebody else"));
  first.commit();
  EXPECT_EQ(bytes_of(path), "first");
  AtomicFile(path).commit();
  EXPECT_EQ(bytes_of(path), "");
}

TEST(AtomicFileTest, FailuresNamePathAndReason) {
  const TemporaryDirectory folder;
  EXPECT_THAT(error_of([&] { write_snapshot(folder / "absent" / "latest", {}); }),
              AllOf(HasSubstr("absent/latest"), HasSubstr("No such file")));
  std::filesystem::create_directory(folder / "folder");
  EXPECT_THAT(error_of([&] { write_snapshot(folder / "folder", {}); }),
              AllOf(HasSubstr("folder"), HasSubstr("directory")));
  EXPECT_FALSE(std::filesystem::exists(folder / "folder.tmp"));
}

}  // namespace
}  // namespace gpipe
