#include <sys/stat.h>

#include "gpipe/snapshot/safetensors.h"
#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

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
  for (std::size_t size = 0; size < whole.size(); size += size < whole.size() - 300 ? 97 : 7) {
    ASSERT_THAT(refusal_of(whole.substr(0, size)), HasSubstr(path_.string())) << size;
  }
  EXPECT_THAT(refusal_of(whole + "more"), HasSubstr("4 bytes belong to no tensor"));
  EXPECT_NE(refusal_of(whole.substr(0, 2000) + whole.substr(2001)), "");
  EXPECT_EQ(refusal_of(whole), "");
}

TEST_F(SnapshotDamage, FlippedBitsAreRefused) {
  const auto whole = to_bytes(small_snapshot());
  for (std::size_t at = 0; at < whole.size(); at += 23) {
    auto damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 1 << at % 8);
    ASSERT_THROW(from_bytes(damaged), std::runtime_error) << "byte " << at << " of " << whole.size();
  }
}

TEST_F(SnapshotDamage, OtherFilesAreRefused) {
  EXPECT_THAT(refusal(), AllOf(HasSubstr(path_.string()), HasSubstr("No such file")));
  EXPECT_THAT(refusal_of(""), HasSubstr("truncated"));
  EXPECT_THAT(refusal_of("epoch,loss\n1,0.5\n"), HasSubstr("not a safetensors file"));
  EXPECT_THAT(error_of([&] { read_snapshot(path_.parent_path()); }), HasSubstr("directory"));
  torch::save(torch::ones({3}), path_.string());
  EXPECT_THAT(refusal(), HasSubstr("not a safetensors file"));
  write_safetensors(path_, {.tensors = {{"a", torch::ones({3})}}, .training = ""});
  EXPECT_THAT(refusal(), HasSubstr("not a snapshot: the file has only weights"));
  EXPECT_TRUE(torch::equal(read_weights(path_)["a"], torch::ones({3})));
}

/// A file with this header and bytes.
std::string file_of(const std::string& header, const std::string& bytes) {
  const std::uint64_t size = header.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + header + bytes;
}

TEST_F(SnapshotDamage, DeepJsonIsRefused) {
  for (const std::size_t levels : {200, 50000}) {
    const auto deep = std::string(levels, '[') + std::string(levels, ']');
    write_safetensors(path_, {.tensors = {}, .training = R"({"version": 2, "epoch": 1, "position": )" + deep + "}"});
    EXPECT_THAT(refusal(), HasSubstr("JSON object of at most 100 levels"));
    EXPECT_THAT(refusal_of(file_of("{\"a\": " + deep + "}", "")), HasSubstr("not a safetensors file"));
  }
}

TEST_F(SnapshotDamage, TensorsMustFillTheFile) {
  const auto read = [&](const std::string& entries, const std::string& bytes) {
    write_bytes(path_, file_of("{" + entries + "}", bytes));
    return error_of([&] { read_weights(path_); });
  };
  const auto entry = [](const std::string& type, const std::string& shape, const std::string& place) {
    return R"("a":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" + place + "}";
  };
  EXPECT_EQ(read(entry("F32", "[2]", "[0,8]"), "12345678"), "");
  EXPECT_EQ(read(entry("F32", "[0,3]", "[0,0]"), ""), "");
  EXPECT_THAT(read(entry("F32", "[0,9223372036854775807]", "[0,0]"), ""),
              HasSubstr("the shape of 'a' is out of range"));
  const auto expect_refused = [&](const std::string& shape, const std::string& place) {
    EXPECT_NE(read(entry("F32", shape, place), "12345678"), "") << shape << " " << place;
  };
  for (const auto* place : {"[0,4]", "[4,12]", "[8,0]", "[0]", "[0,8,8]", "[0,18446744073709551615]"}) {
    expect_refused("[2]", place);
  }
  for (const auto* shape : {"[4611686018427387906]", "[18446744073709551615]", "[-2]", "[2.0]", "2", "null"}) {
    expect_refused(shape, "[0,8]");
  }
  expect_refused("[3]", "[0,12]");
  expect_refused("[1]", "[0,4]");
  EXPECT_THAT(read(entry("F31", "[2]", "[0,8]"), "12345678"), HasSubstr("unknown type \"F31\""));
  EXPECT_THAT(read(R"("a":3)", ""), HasSubstr("'a' is not described as a tensor"));
  EXPECT_THAT(read(entry("U8", "[4]", "[0,4]") + "," + entry("U8", "[4]", "[4,8]"), "12345678"), HasSubstr("'a'"));
  EXPECT_THAT(read(R"("__metadata__":{"complex128":"[\"a\"]"},)" + entry("F32", "[2]", "[0,8]"), "12345678"),
              HasSubstr("'a' is not stored as complex128"));
}

TEST_F(SnapshotDamage, OtherContentsAreRefused) {
  const auto changed = [&](const std::string& from, const std::string& to) {
    auto file = to_safetensors(small_snapshot());
    const auto place = file.training.find(from);
    if (place == file.training.npos) return "no " + from + " in " + file.training;
    file.training.replace(place, from.size(), to);
    return error_of([&] { from_safetensors(std::move(file)); });
  };
  EXPECT_EQ(changed(R"("epoch":7)", R"("epoch":8)"), "");
  EXPECT_THAT(changed(R"("version":2)", R"("version":3)"), AllOf(HasSubstr("has version 3"), HasSubstr("newer")));
  for (const auto* key :
       {"version", "epoch", "position", "options", "optimizer", "type", "param_groups", "state", "params"}) {
    EXPECT_THAT(changed("\"" + std::string(key) + "\":", "\"other\":"), HasSubstr("'" + std::string(key) + "'")) << key;
  }
  for (const auto* epoch : {"7.5", "true", "\"7\"", "null", "9223372036854775808"}) {
    EXPECT_THAT(changed(R"("epoch":7)", R"("epoch":)" + std::string(epoch)), HasSubstr("'epoch' is")) << epoch;
  }
  EXPECT_THAT(changed(R"("amsgrad":true)", R"("amsgrad":{})"), HasSubstr("'amsgrad' of the optimizer is {}"));
  EXPECT_THAT(changed(R"("empty":"")", R"("empty":0)"), HasSubstr("'empty' is 0"));
  for (const auto* name : {".mine", ".optimizer.sum", ".history.loss"}) {
    auto file = to_safetensors(small_snapshot());
    file.tensors[name] = torch::ones({3});
    EXPECT_THAT(error_of([&] { from_safetensors(file); }), HasSubstr("belongs to no field")) << name;
  }
}

TEST_F(SnapshotDamage, OnlyRegularFilesAreRead) {
  EXPECT_THAT(error_of([] { read_snapshot("/dev/zero"); }), HasSubstr("'/dev/zero': not a regular file"));
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(refusal(), HasSubstr("not a regular file"));
  std::filesystem::remove(path_);
  write_bytes(path_, file_of("{}", ""));
  std::filesystem::resize_file(path_, std::uintmax_t{1} << 42);
  EXPECT_THAT(refusal(), HasSubstr("belong to no tensor"));
}

TEST_F(SnapshotDamage, UnreadableValuesAreNotWritten) {
  const auto tensor = [](const std::string& name, const at::Tensor& value) {
    return [=](Snapshot& snapshot) { snapshot.model.insert(name, value); };
  };
  const auto of_optimizer = [](const std::string& name, const c10::IValue& value) {
    return [=](Snapshot& snapshot) { snapshot.optimizer.state["a"][name] = value; };
  };
  const auto ones = torch::ones({2});
  const std::pair<std::function<void(Snapshot&)>, std::string> cases[] = {
      {tensor("a", {}), "'a' is undefined"},
      {tensor("a", ones.to_sparse()), "layout Sparse"},
      {tensor("a", ones.to(torch::kMeta)), "on meta"},
      {tensor("a", torch::quantize_per_tensor(ones, 0.1, 0, torch::kQInt8)), "type QInt8"},
      {tensor(".a", ones), "'.a' begins with a dot"},
      {tensor("__metadata__", ones), "'__metadata__', which the format keeps"},
      {of_optimizer("b.c", ones), "'b.c' has a dot"},
      {of_optimizer("step", torch::Device("cpu")), "'step' of the optimizer cannot be saved"},
      {of_optimizer("step", std::numeric_limits<double>::quiet_NaN()), "not a finite number"},
      {[](Snapshot& snapshot) { snapshot.options["a"] = "\xff"; }, "not UTF-8"}};
  for (const auto& [change, text] : cases) {
    Snapshot snapshot;
    change(snapshot);
    EXPECT_THAT(error_of([&] { write_snapshot(path_, snapshot); }), AllOf(HasSubstr(path_.string()), HasSubstr(text)));
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
}

}  // namespace
}  // namespace gpipe
