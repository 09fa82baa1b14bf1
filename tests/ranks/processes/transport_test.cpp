#include "gpipe/ranks/transport.h"

#include <cstring>

#include "gpipe/tensors/transfer.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

Outgoing message_of(const Tensor& tensor) {
  Parcel parcel;
  parcel.add(tensor, /*gradient_wanted=*/false);
  return to_message({std::move(parcel)}, /*rank=*/1, {});
}

/// The tensor as it arrives.
Tensor carried(const Tensor& tensor) {
  const auto message = message_of(tensor);
  EXPECT_TRUE(message.is_layout);
  auto incoming = allocate_parcels(message.text);
  const auto pieces = incoming->pieces();
  EXPECT_EQ(pieces.size(), message.pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_EQ(pieces[i].size(), message.pieces[i].size());
    std::copy(message.pieces[i].begin(), message.pieces[i].end(), pieces[i].begin());
  }
  const auto parcels = to_parcels({.memory = std::move(incoming)}, {});
  EXPECT_FALSE(parcels.at(0).changed());
  return parcels[0].tensors.at(0);
}

std::size_t bytes_of_pieces(const Outgoing& message) {
  std::size_t bytes = 0;
  for (const auto piece : message.pieces) bytes += piece.size();
  return bytes;
}

TEST(ParcelMessage, KeepsStridesAndAlignment) {
  const auto x = torch::arange(6 * 8 * 10, torch::kFloat).view({6, 8, 10});
  const std::vector<Tensor> tensors = {
      x,
      x[0][0][0],
      x.flatten().slice(0, 3),
      x.transpose(0, 2),
      x.slice(2, 3, 7),
      x.slice(0, 1, 6, 2).slice(2, 1),
      x.permute({2, 0, 1}).slice(0, 5),
      x[0].slice(1, 2, 3).expand({8, 5}),
      x.slice(0, 0, 1).slice(0, 1).expand({0, 8, 10}),
      x.slice(1, 3, 4).expand({6, 9, 10}).slice(2, 1, 4),
      x.flatten().unfold(0, 5, 2),
      x.slice(0, 2, 2),
      torch::ones({}).expand({3, 4}),
      torch::tensor({1, 0, 1}, torch::kBool),
      x.to(torch::kBFloat16).slice(2, 1, 4),
      torch::view_as_complex(x.slice(2, 2, 4)),
  };
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i));
    const auto& tensor = tensors[i];
    const auto received = carried(tensor);
    EXPECT_TRUE(torch::equal(received, tensor));
    EXPECT_EQ(received.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(received.strides(), tensor.strides());
    EXPECT_EQ(lead_of(received), lead_of(tensor));
  }
  const auto conjugate = torch::view_as_complex(x.slice(2, 2, 4)).conj();
  EXPECT_TRUE(torch::equal(carried(conjugate), conjugate));
  EXPECT_FALSE(carried(Tensor()).defined());
}

TEST(ParcelMessage, RefusesTensorsThatSizesAndStridesDoNotDescribe) {
  const auto x = torch::ones({2, 3});
  const std::vector<std::pair<Tensor, std::string>> refused = {
      {torch::quantize_per_tensor(x, /*scale=*/0.5, /*zero_point=*/1, torch::kQUInt8), "quantized"},
      {torch::_nested_tensor_from_tensor_list({x, x[0].unsqueeze(0)}), "nested"},
      {x.to_sparse(), "Sparse"},
      {x.to_sparse_csr(), "SparseCsr"},
      {x.to_mkldnn(), "Mkldnn"}};
  for (const auto& test : refused) {
    EXPECT_THAT([&] { message_of(test.first); },
                throws<std::invalid_argument>("a tensor that goes to another rank is " + test.second));
  }
  EXPECT_TRUE(torch::equal(carried(torch::_efficientzerotensor({2, 3}, torch::kDouble)), x.to(torch::kDouble) * 0));
}

TEST(ParcelMessage, SendsNoRepeatsAndNoGaps) {
  const auto x = torch::ones({6, 8});
  EXPECT_EQ(bytes_of_pieces(message_of(x.slice(1, 0, 2))), 6 * 2 * 4);
  EXPECT_EQ(bytes_of_pieces(message_of(x[0].expand({1000, 8}))), 8 * 4);
  EXPECT_EQ(bytes_of_pieces(message_of(torch::ones({}).expand({1000, 8}))), 4);
}

TEST(ParcelMessage, RefusesMalformedLayouts) {
  const auto layout = message_of(torch::ones({2, 3})).text;
  for (const auto& other : {std::string(), layout.substr(0, layout.size() - 1), layout + "x"}) {
    EXPECT_THAT([&] { allocate_parcels(other); }, throws<std::runtime_error>("malformed layout"));
  }
  EXPECT_NO_THROW(allocate_parcels(layout));
}

}  // namespace
}  // namespace gpipe
