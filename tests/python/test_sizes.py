"""Conversion of modules: which sizes of inputs a sequence takes, which dimension is the batch, and what it refuses."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from gpipe import to_sequential
from gpipe.balance import balance_by_size
from helpers import named_gradients
from small_models import Calls, Returns, assert_equal_in_each_mode, batch
from test_to_sequential import convert


def test_inputs_with_a_common_size_must_have_it():
    sequence = to_sequential(Returns(lambda x, y: (x * y).cumsum(1)), batch(), batch())
    assert torch.equal(sequence((batch(5)[:, :3], batch(5)[:, :3])), batch(5)[:, :3].square().cumsum(1))
    with pytest.raises(ValueError, match=r"y.shape\[1\] == x.shape\[1\], but"):
        sequence((batch(), batch()[:, :1]))


def shortens(model, x):
    x = x[:, 1:] if model.a.training else x
    return x.exp().sum(1) / x.shape[1]


def test_a_number_that_another_module_decides_about_needs_its_mode():
    model = Calls(shortens)
    sequence = to_sequential(model, batch(2), native=True)
    assert_equal_in_each_mode(sequence, Calls(shortens), batch(3)[:, :3])
    model.a.eval()
    with pytest.raises(RuntimeError, match="with modules in other modes than at the conversion"):
        sequence(batch(3))


class Correlation(nn.Module):
    """Correlates two maps. Its operators tell one sample from more when they are exported."""

    def __init__(self, result):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 4)
        self.result = result

    def forward(self, x, y):
        a, b = torch.chunk(self.conv(torch.cat([x, y])), 2)
        product = torch.matmul(a.view(a.shape[0], 4, 16), b.view(b.shape[0], 4, 16).transpose(1, 2))
        return self.result(x, x.flatten(1)[:, None, :4] + self.head(product))


def test_one_sample_is_taken_unless_the_code_treats_it_differently():
    x, y = torch.rand(2, 3, 1, 4, 4).double()
    model = Correlation(lambda x, output: output).double()
    pipe = gpipe.GPipe(to_sequential(model, x, y), [1, 1], chunks=3)
    torch.testing.assert_close(pipe((x, y)), model(x, y))
    model = Correlation(lambda x, output: output if x.squeeze(0).dim() == 4 else 2 * output).double()
    sequence = to_sequential(model, x, y)
    with pytest.raises(ValueError, match=r"samples >= 2, but a micro-batch has the shape \(1, 1, 4, 4\), "):
        sequence((x[:1], y[:1]))


@pytest.mark.parametrize(("function", "wrong", "message"), [
    (lambda x: x * torch.ones(4), batch()[:, :3], r"input 0 has the shape \(6, 3\), .* for \(batch, 4\); convert"),
    (lambda x: x * (3 if x.shape[0] > 4 else 2), batch(3), r"samples >= 5, but a micro-batch has the shape \(3, 4\):"),
    (lambda x: x * (3 if x.shape[0] % 2 else 2), batch(5), r"\(samples % 2\) == 0, but a micro-batch has .* \(5, 4\):"),
    (lambda x: x * (3 if x.shape[1] > 3 else 2), batch()[:, :3], r"shape\[1\] >= 4, but a micro-batch has .* \(6, 3\):"),
    (lambda x: x * (3 if x.shape[1] > 1 else 2), batch(1)[:, :1], r"shape\[1\] >= 2, but a micro-batch has .* \(1, 1\):"),
    (lambda x: x * (3 if x.shape[0] > 1 else 2), batch(1), r"samples >= 2, but a micro-batch has .* \(1, 4\):"),
])  # fmt: skip
def test_inputs_unlike_the_example_are_refused(function, wrong, message):
    sequence = convert(function)
    assert torch.equal(sequence(batch(8)), function(batch(8)))
    with pytest.raises(ValueError, match=message):
        sequence(wrong)


# Models whose sequences come first: dimension 1 of inputs, outputs and targets is the batch.


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
    sequence = to_sequential(model, words, *state, batch_dim=1)
    torch.testing.assert_close(sequence((words, *state)), plain(words, *state))
    first = len(sequence) // 2
    pipe = gpipe.GPipe(sequence, [first, len(sequence) - first], devices=["cpu", "cpu"], chunks=3)
    measured = []
    with model.embed.register_forward_hook(lambda module, args, output: measured.append(output.shape)):
        balance_by_size(2, sequence, (words, *state), chunks=3)
    assert {*measured} == {(5, 2, 4)}
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


def test_errors_about_shapes_tell_that_layers_have_the_batch_first():
    sequence = to_sequential(nn.Sequential(nn.Linear(4, 4)), torch.randn(5, 6, 4), batch_dim=1, native=True)
    for call in (sequence, gpipe.GPipe(sequence, [1], devices=["cpu"], chunks=2)):
        with pytest.raises(ValueError, match=r"input 0 has the shape \(\d, 5, 3\)") as error:
            call(torch.randn(5, 6, 3))
        assert "swap dimensions 0 and 1" in "".join(error.value.__notes__)
