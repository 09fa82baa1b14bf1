"""Models whose sequences come first: dimension 1 of inputs, outputs and targets is the batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from helpers import named_gradients


class Words(nn.Module):
    """A model of words, with a hidden state that is carried on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.recurrent, self.decode = nn.Embedding(7, 4), nn.LSTM(4, 4, 2), nn.Linear(4, 7)

    def forward(self, words, hidden, cell):
        output, (hidden, cell) = self.recurrent(self.embed(words), (hidden, cell))
        return self.decode(output), hidden, cell


def loss(output, target):
    return F.cross_entropy(output[0].view(-1, 7), target.view(-1), reduction="sum")


def test_a_model_whose_sequences_come_first_trains_as_it_is():
    model = Words().double()
    plain = copy.deepcopy(model)
    words, target = torch.randint(7, (2, 5, 6))
    state = torch.zeros(2, 2, 6, 4).double()
    with pytest.raises(ValueError, match="the example's have 2 and 5 samples; a model whose sequences come first needs batch_dim"):
        gpipe.to_sequential(model, words, *state)
    with pytest.raises(ValueError, match="depends on the other samples of the mini-batch"):
        gpipe.to_sequential(nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, 0.0)), torch.randn(5, 6, 4))
    sequence = gpipe.to_sequential(model, words, *state, batch_dim=1)
    torch.testing.assert_close(sequence((words, *state)), plain(words, *state))
    first = len(sequence) // 2
    pipe = gpipe.GPipe(sequence, [first, len(sequence) - first], devices=["cpu", "cpu"], chunks=3)
    for _ in range(2):
        found, output = pipe.step((words, *state), target, gpipe.Loss(loss, reduction="sum"), return_output=True)
        expected = loss(outputs := plain(words, *state), target)
        expected.backward()
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(output, tuple(each.detach() for each in outputs))
        torch.testing.assert_close(named_gradients(model), named_gradients(plain))
        state = torch.stack(output[1:])
    torch.testing.assert_close(pipe(words, *state), plain(words, *state))
    torch.testing.assert_close(pipe.evaluate((words, *state), target, loss), loss(plain(words, *state), target).detach())
    with pytest.raises(ValueError, match=r"has the shape \(6,\), but dimension 1 of each must be the batch"):
        pipe((words, *state[:1], torch.zeros(6)))
    with pytest.raises(ValueError, match="batch_dim must be 0 or 1, but is 2"):
        gpipe.to_sequential(model, words, *state, batch_dim=2)


@pytest.mark.parametrize(
    "head, text",
    [
        (lambda x: x.view(-1, 4), r"has the shape \(5\*samples, 4\), without the batch as dimension 1; return it per sample"),
        (lambda x: x.softmax(1), "which a pipeline cuts along dimension 1; leave out batch_dim, and compute losses"),
    ],
)
def test_refusals_speak_of_the_dimension_that_is_the_batch(head, text):
    class Head(nn.Linear):
        def forward(self, x):
            return head(super().forward(x))

    with pytest.raises(ValueError, match=text):
        gpipe.to_sequential(Head(4, 4), torch.randn(5, 6, 4), batch_dim=1)


def test_examples_that_are_no_batch_along_dimension_1_are_refused():
    with pytest.raises(ValueError, match="dimension 1 of each input must be the batch, but the example's have 6 and 7 samples$"):
        gpipe.to_sequential(nn.Bilinear(4, 4, 4), torch.randn(5, 6, 4), torch.randn(5, 7, 4), batch_dim=1)
