#include <sys/stat.h>

#include "gpipe/snapshot/folder.h"
#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

class SnapshotDamage : public testing::Test {
 protected:
  std::string refusal() {
    return error_of([&] { read_weights(path_); });
  }
  std::string refusal_of(std::string_view bytes) {
    write_bytes(path_, bytes);
    return refusal();
  }

  TemporaryDirectory folder_;
  const std::filesystem::path path_ = folder_ / "file";
};

/// Tensors of every type and layout.
std::map<std::string, at::Tensor> sample_tensors() {
  const auto base = torch::randn({8, 6, 4, 5});
  std::map<std::string, at::Tensor> tensors = {
      {"view", base.select(1, 3)},
      {"transposed", base.transpose(0, 1)},
      {"expanded", torch::ones({1, 3}).expand({5, 3})},
      {"channels last", base.contiguous(torch::MemoryFormat::ChannelsLast)},
      {"scalar", torch::tensor(5)},
      {"empty", torch::empty({0, 3})},
      {"gradients", torch::randn({2}, torch::requires_grad())},
      {"not numbers", torch::tensor({std::nan("3"), -0.0, HUGE_VAL}, torch::kFloat64)},
      {"conjugate", torch::randn({3}, torch::kComplexFloat).conj()},
      {"imaginary", torch::imag(torch::randn({3}, torch::kComplexFloat).conj())}};
  for (const auto type : {torch::kBool, torch::kUInt8, torch::kInt64, torch::kHalf, torch::kBFloat16, torch::kDouble,
                          torch::kFloat8_e5m2, torch::kComplexFloat}) {
    tensors[torch::toString(type)] = base.to(type);
  }
  tensors["the same"] = tensors["Double"];
  return tensors;
}

TEST(Safetensors, RoundTripOfTensorsOfEveryTypeAndLayout) {
  const TemporaryDirectory folder;
  const auto tensors = sample_tensors();
  write_safetensors(folder / "tensors", {.tensors = tensors, .model = ""});
  const auto read = read_safetensors(folder / "tensors").tensors;
  ASSERT_EQ(read.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(same_bits(read.at(name), tensor)) << name;
  EXPECT_FALSE(read.at("gradients").requires_grad());
  for (SafetensorsFile file(folder / "tensors"); const auto& [name, tensor] : tensors) {
    const auto like = file.without_data(name);
    EXPECT_TRUE(like.is_meta() && like.dtype() == tensor.dtype() && like.sizes() == tensor.sizes()) << name;
  }

  write_safetensors(folder / "view", {.tensors = {{"small view", torch::zeros({1000000})[0]}}, .model = ""});
  EXPECT_LT(std::filesystem::file_size(folder / "view"), 10000);
}

TEST_F(SnapshotDamage, TruncatedFilesAreRefused) {
  write_safetensors(path_, {.tensors = sample_tensors(), .model = ""});
  const auto whole = bytes_of(path_);
  for (std::size_t size = 0; size < whole.size(); size += size < whole.size() - 300 ? 997 : 7) {
    ASSERT_THAT(refusal_of(whole.substr(0, size)), HasSubstr(path_.string())) << size;
  }
  EXPECT_THAT(refusal_of(whole + "more"), HasSubstr("4 bytes belong to no tensor"));
  EXPECT_NE(refusal_of(whole.substr(0, 2000) + whole.substr(2001)), "");
  EXPECT_EQ(refusal_of(whole), "");
}

TEST_F(SnapshotDamage, FlippedBitsAreRefused) {
  write_safetensors(path_, {.tensors = {{"a", torch::randn({40})}, {"b", torch::arange(9)}}, .model = "{}"});
  const auto whole = bytes_of(path_);
  EXPECT_EQ(refusal_of(whole), "");
  for (std::size_t at = 0; at < whole.size(); ++at) {
    auto damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 1 << at % 8);
    ASSERT_NE(refusal_of(damaged), "") << "byte " << at << " of " << whole.size();
  }
}

TEST_F(SnapshotDamage, OtherFilesAreRefused) {
  const auto of_snapshot = [&] { return error_of([&] { read_progress(path_); }); };
  EXPECT_THAT(refusal(), AllOf(HasSubstr(path_.string()), HasSubstr("No such file")));
  EXPECT_THAT(of_snapshot(), AllOf(HasSubstr(path_.string()), HasSubstr("No such file")));
  EXPECT_THAT(refusal_of(""), HasSubstr("truncated"));
  EXPECT_THAT(refusal_of("epoch,loss\n1,0.5\n"), HasSubstr("not a safetensors file"));
  EXPECT_THAT(of_snapshot(), HasSubstr("Not a directory"));
  EXPECT_THAT(error_of([&] { read_weights(path_.parent_path()); }), HasSubstr("No such file"));
  torch::save(torch::ones({3}), path_.string());
  EXPECT_THAT(refusal(), HasSubstr("not a safetensors file"));
  write_safetensors(path_, {.tensors = {{"a", torch::ones({3})}}, .model = ""});
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
    EXPECT_THAT(refusal_of(file_of("{\"a\": " + deep + "}", "")), HasSubstr("not a safetensors file"));
    std::filesystem::create_directory(folder_ / "s");
    write_bytes(folder_ / "s" / kManifest, R"({"version": 1, "extra": )" + deep + "}");
    EXPECT_THAT(error_of([&] { read_progress(folder_ / "s"); }), HasSubstr("JSON object of at most 100 levels"));
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
}

TEST_F(SnapshotDamage, AManifestOfAnotherContentIsRefused) {
  const auto refused = [&](const char* key, const nlohmann::json& value) {
    std::filesystem::create_directory(folder_ / "s");
    nlohmann::json manifest = {{"version", 1}, {"files", nlohmann::json::object()}};
    manifest[key] = value;
    write_bytes(folder_ / "s" / kManifest, with_checksum(manifest).dump());
    return error_of([&] { read_progress(folder_ / "s"); });
  };
  EXPECT_EQ(refused("version", 1), "");
  EXPECT_THAT(refused("version", 2), AllOf(HasSubstr("has version 2"), HasSubstr("newer")));
  EXPECT_THAT(refused("version", "1"), HasSubstr("not a snapshot"));
  EXPECT_THAT(refused("files", {{"model-1", {{"size", 1}, {"crc32", "0"}, {"tensors", {"a"}}}}}),
              HasSubstr("model-1 is missing"));
  EXPECT_THAT(refused("files", {{"model-1", 3}}), HasSubstr("not a snapshot"));
  EXPECT_THAT(refused("step", "3"), HasSubstr("must be number"));
}

TEST_F(SnapshotDamage, OnlyRegularFilesAreRead) {
  EXPECT_THAT(error_of([] { read_weights("/dev/zero"); }), HasSubstr("'/dev/zero': not a regular file"));
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(refusal(), HasSubstr("not a regular file"));
  std::filesystem::remove(path_);
  write_bytes(path_, file_of("{}", ""));
  std::filesystem::resize_file(path_, std::uintmax_t{1} << 42);
  EXPECT_THAT(refusal(), HasSubstr("belong to no tensor"));
}

TEST_F(SnapshotDamage, UnreadableValuesAreNotWritten) {
  const auto ones = torch::ones({2});
  const std::pair<std::map<std::string, at::Tensor>, std::string> cases[] = {
      {{{"a", {}}}, "'a' is undefined"},
      {{{"a", ones.to_sparse()}}, "layout Sparse"},
      {{{"a", ones.to(torch::kMeta)}}, "on meta"},
      {{{"a", ones.to(torch::kComplexDouble)}}, "type ComplexDouble"},
      {{{"a", torch::quantize_per_tensor(ones, 0.1, 0, torch::kQInt8)}}, "type QInt8"},
      {{{"__metadata__", ones}}, "'__metadata__', which the format keeps"},
      {{{"\xff", ones}}, "not UTF-8"}};
  for (const auto& [tensors, text] : cases) {
    const auto write = [&, &given = tensors] { write_safetensors(path_, {.tensors = given, .model = ""}); };
    EXPECT_THAT(error_of<std::exception>(write), HasSubstr(text));
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
}

TEST(ReplaceFile, KeepsThePreviousFileUntilAllIsWritten) {
  const TemporaryDirectory folder;
  const auto path = folder / "file";
  write_bytes(path, "old");
  const auto abandon = [](const ByteSink& sink) {
    sink("new", 3);
    throw std::runtime_error("abandoned");
  };
  EXPECT_EQ(error_of([&] { replace_file(path, abandon); }), "abandoned");
  EXPECT_EQ(bytes_of(path), "old");
  EXPECT_FALSE(std::filesystem::exists(folder / "file.tmp"));

  write_bytes(folder / "file.tmp", "left by a killed writer");
  replace_file(path, [&](const ByteSink& sink) {
    sink("n", 1);
    sink("ew", 2);
    EXPECT_EQ(bytes_of(path), "old");
    EXPECT_THAT(error_of([&] { replace_file(path, abandon); }), HasSubstr("another writer"));
  });
  EXPECT_EQ(bytes_of(path), "new");
  EXPECT_FALSE(std::filesystem::exists(folder / "file.tmp"));
}

}  // namespace
}  // namespace gpipe
