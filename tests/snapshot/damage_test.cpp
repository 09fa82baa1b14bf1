#include <caffe2/serialize/inline_container.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpipe/snapshot.h"
#include "gpipe/snapshot/archive.h"
#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SnapshotDamage : public testing::Test {
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

TEST_F(SnapshotDamage, TruncatedFilesAreRefused) {
  write_snapshot(path_, small_snapshot());
  const auto whole = bytes_of(path_);
  for (std::size_t size = 0; size < whole.size(); size += size < whole.size() - 300 ? 13 : 1) {
    const auto error = refusal_of(whole.substr(0, size));
    ASSERT_THAT(error, AllOf(HasSubstr(path_.string()), HasSubstr(size < 4 ? "not a zip archive" : "truncated")))
        << size;
  }
  EXPECT_THAT(refusal_of(whole + "more"), HasSubstr("damaged"));
  EXPECT_THAT(refusal_of(whole.substr(0, 2000) + whole.substr(2001)), HasSubstr("damaged"));
  EXPECT_EQ(refusal_of(whole), "");
}

TEST_F(SnapshotDamage, FlippedBitsAreRefusedOrHaveNoEffect) {
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
  // The other bytes are padding, times, and redundant fields of the zip format.
  EXPECT_GT(refused, (5056u + 500u) / 3);
}

TEST_F(SnapshotDamage, OtherFilesAreRefused) {
  EXPECT_THAT(refusal(), AllOf(HasSubstr(path_.string()), HasSubstr("No such file")));
  EXPECT_THAT(refusal_of(""), HasSubstr("the file is not a zip archive"));
  EXPECT_THAT(refusal_of("epoch,loss\n1,0.5\n"), HasSubstr("the file is not a zip archive"));
  EXPECT_THAT(error_of([&] { read_snapshot(path_.parent_path()); }), HasSubstr("directory"));

  torch::save(small_model(), path_.string());
  EXPECT_THAT(refusal(), HasSubstr("TorchScript"));
  torch::save(torch::ones({3}), path_.string());
  EXPECT_THAT(refusal(), HasSubstr("the file contains TorchScript"));
  const auto pickled = torch::pickle_save(c10::Dict<std::string, at::Tensor>());
  EXPECT_THAT(refusal_of({pickled.data(), pickled.size()}),
              HasSubstr("refers to 'torch.jit._pickle.restore_type_tag'"));
  write_archive(path_, torch::ones({3}));
  EXPECT_THAT(refusal(), HasSubstr("not a snapshot: the file contains a Tensor, not a dict"));
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  dict.insert("format", "another snapshot");
  write_archive(path_, dict);
  EXPECT_THAT(refusal(), HasSubstr("its 'format' is 'another snapshot', not 'gpipe snapshot'"));
  dict.insert(1, 2);
  write_archive(path_, dict);
  EXPECT_THAT(refusal(), HasSubstr("a key that is not a str"));
}

TEST_F(SnapshotDamage, OtherContentsAreRefused) {
  const auto changed = [&](const std::function<void(c10::impl::GenericDict&)>& change) {
    write_snapshot(path_, small_snapshot());
    const auto bytes = bytes_of(path_);
    auto dict = torch::pickle_load({bytes.begin(), bytes.end()}).toGenericDict();
    change(dict);
    write_archive(path_, dict);
    return refusal();
  };
  EXPECT_EQ(changed([](auto&) {}), "");
  EXPECT_EQ(changed([](auto& dict) { dict.insert("mine", 1); }), "");
  EXPECT_THAT(changed([](auto& dict) { dict.insert_or_assign("version", 2); }),
              AllOf(HasSubstr("has version 2"), HasSubstr("newer")));
  for (const auto* key : {"version", "model", "optimizer", "epoch", "position", "random", "options", "history"}) {
    EXPECT_THAT(changed([&](auto& dict) { static_cast<void>(dict.erase(key)); }),
                HasSubstr("no '" + std::string(key) + "'"));
    EXPECT_THAT(changed([&](auto& dict) { dict.insert_or_assign(key, true); }),
                HasSubstr("'" + std::string(key) + "'"));
  }
}

/// An archive as torch.save writes it.
std::string archive_of(const std::string& pickle, const std::vector<std::string>& storages) {
  std::string bytes;
  {
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
      bytes.append(static_cast<const char*>(data), size);
      return size;
    });
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    for (std::size_t i = 0; i < storages.size(); ++i) {
      writer.writeRecord("data/" + std::to_string(i), storages[i].data(), storages[i].size());
    }
    writer.writeEndOfFile();
  }
  return bytes;
}

TEST_F(SnapshotDamage, PicklesExecuteNothing) {
  const auto touched = folder_ / "touched";
  const auto command = "touch '" + touched.string() + "'";
  auto pickle = std::string("\x80\x02") + "cos\nsystem\nX";
  pickle += {static_cast<char>(command.size()), 0, 0, 0};
  pickle += command + "\x85R.";
  EXPECT_THAT(refusal_of(archive_of(pickle, {})), HasSubstr("os.system"));
  EXPECT_FALSE(std::filesystem::exists(touched));
}

TEST_F(SnapshotDamage, TensorsMustLieInsideTheirRecords) {
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* data, std::size_t size) { pickle.append(data, size); });
  pickler.protocol();
  pickler.pushIValue(torch::ones({8}));
  pickler.stop();
  EXPECT_THAT(refusal_of(archive_of(pickle, {std::string(32, '1')})),
              HasSubstr("not a snapshot: the file contains a Tensor, not a dict"));
  EXPECT_THAT(refusal_of(archive_of(pickle, {std::string(28, '1')})), HasSubstr("'data/0' has 28 bytes"));
}

std::vector<std::filesystem::path> corpus(const std::string& name) {
  const auto tests = std::filesystem::path(__FILE__).parent_path().parent_path();
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(tests / "fuzz" / "corpus" / name)) {
    paths.push_back(entry.path());
  }
  return paths;
}

TEST_F(SnapshotDamage, HostileFilesAreRefused) {
  const auto expect = [&](const std::filesystem::path& file, std::string_view bytes) {
    const bool accepted = file.filename().string().starts_with("accepted");
    const auto refusal = refusal_of(bytes);
    EXPECT_EQ(refusal.empty(), accepted) << file << ": " << refusal;
  };
  for (const auto& file : corpus("zip")) expect(file, bytes_of(file));
  // With the same records as in tests/fuzz/snapshot.cpp.
  for (const auto& file : corpus("snapshot")) expect(file, archive_of(bytes_of(file), {std::string(64, '\1'), ""}));
}

TEST_F(SnapshotDamage, OnlyRegularFilesAreRead) {
  EXPECT_THAT(error_of([] { read_snapshot("/dev/zero"); }), HasSubstr("'/dev/zero': not a regular file"));
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(refusal(), HasSubstr("not a regular file"));
  std::filesystem::remove(path_);
  write_bytes(path_, "PK\3\4");
  std::filesystem::resize_file(path_, std::uintmax_t{1} << 42);
  EXPECT_THAT(refusal(), HasSubstr("truncated"));
}

TEST_F(SnapshotDamage, UnreadableValuesAreNotWritten) {
  const auto refusal_to_write = [&](const std::function<void(Snapshot&)>& change) {
    Snapshot snapshot;
    change(snapshot);
    const auto error = error_of([&] { write_snapshot(path_, snapshot); });
    EXPECT_FALSE(std::filesystem::exists(path_));
    return error;
  };
  const auto tensor = [&](const at::Tensor& tensor) {
    return refusal_to_write([&](auto& snapshot) { snapshot.model.insert("a", tensor); });
  };
  EXPECT_THAT(tensor({}), AllOf(HasSubstr(path_.string()), HasSubstr("'a' of the model is undefined")));
  EXPECT_THAT(tensor(torch::ones({2}).to_sparse()), AllOf(HasSubstr(path_.string()), HasSubstr("layout Sparse")));
  EXPECT_THAT(tensor(torch::ones({2}, torch::kMeta)), HasSubstr("on meta"));
  EXPECT_THAT(tensor(torch::quantize_per_tensor(torch::ones({2}), 0.1, 0, torch::kQInt8)), HasSubstr("type QInt8"));
  const auto option = [&](const c10::IValue& value) {
    return refusal_to_write([&](auto& snapshot) { snapshot.optimizer.state["a"]["step"] = value; });
  };
  EXPECT_THAT(option(torch::Device("cpu")), HasSubstr("a value of type Device"));
  EXPECT_THAT(option(c10::ivalue::Tuple::create({c10::Dict<std::string, std::int64_t>()})),
              HasSubstr("'step' of the optimizer contains a dict"));
}

}  // namespace
}  // namespace gpipe
