"""Parameters that layers of several stages share."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from test_step import SCHEDULES

WORDS = 11
MODES = ["never", "except_last", "always"]


class Mix(nn.Module):
    """Uses the matrix of another layer twice."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def forward(self, x):
        return x + torch.tanh(x @ self.matrix.t()) @ self.matrix


def make_model(width=6, **options):
    """Returns seven layers. The first, third and last share a matrix."""
    torch.manual_seed(0)
    words = nn.Embedding(WORDS, width, **options)
    head = nn.Linear(width, WORDS, bias=False)
    head.weight = words.weight
    middle = [nn.Linear(width, width), Mix(words.weight), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(words, *middle, head).double()


def batch(step=0):
    torch.manual_seed(step)
    x = torch.randint(WORDS, (8,))
    return x, (7 * x + 3) % WORDS


def loss_of(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def train(model, step_of=None):
    """Returns the losses and gradients of three steps, and the state afterwards."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    results = []
    for step in range(3):
        optimizer.zero_grad()
        results.append((step_of or loss_of)(model, *batch(step)).detach())
        results += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return [*results, *(value.clone() for value in model.state_dict().values())]


def test_names_and_state_are_those_of_the_model():
    model = make_model()
    plain = copy.deepcopy(model)
    pipe = gpipe.GPipe(model, [1, 3, 3])
    for what in ("named_parameters", "state_dict"):
        assert list(dict(getattr(pipe, what)())) == list(dict(getattr(plain, what)()))
    assert len(list(pipe.named_parameters(remove_duplicate=False))) == len(list(pipe.parameters())) + 2
    other = make_model()
    with torch.no_grad():
        other[0].weight.mul_(2)
    pipe.load_state_dict(other.state_dict())
    assert torch.equal(pipe[6].weight, other[0].weight) and pipe[0].weight is pipe[6].weight
    train(pipe)
    plain.load_state_dict(pipe.state_dict())
    assert plain[0].weight is plain[6].weight and torch.equal(plain[0].weight, pipe[0].weight)


def test_copies_and_pickles_stay_tied():
    pipe = gpipe.GPipe(make_model(), [1, 3, 3], chunks=2)
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert other[0].weight is other[6].weight and other[0].weight is not pipe[0].weight
        torch.testing.assert_close(train(other), train(copy.deepcopy(pipe)))


def test_modules_inside_two_layers():
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(linear, nn.Tanh()), nn.Tanh(), nn.Sequential(linear)).double()
    plain = copy.deepcopy(model)
    x = torch.rand(6, 4).double()
    for each in (gpipe.GPipe(model, [1, 1, 1], chunks=2), plain):
        each(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("checkpoint", MODES)
def test_layers_can_be_tied_and_untied_later(checkpoint):
    pipe = gpipe.GPipe(make_model(), [1, 3, 3], chunks=2, checkpoint=checkpoint)
    plain = make_model()
    x, y = batch()
    loss_of(pipe, x, y)
    pipe.zero_grad()
    for change in ("untie", "tie"):
        for model in (pipe, plain):
            weight = model[0].weight if change == "tie" else nn.Parameter(model[6].weight.detach() * 2)
            model[6].weight = weight
        torch.testing.assert_close(train(pipe), train(plain))
    pipe.load_state_dict(make_model().state_dict(), assign=True)  # as in the model, this unties
    plain.load_state_dict(make_model().state_dict(), assign=True)
    loss_of(pipe, x, y)
    plain.zero_grad()
    loss_of(plain, x, y)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


def test_functional_call_replaces_the_parameter_in_all_stages():
    pipe = gpipe.GPipe(make_model(), [1, 3, 3], chunks=2, checkpoint="never")
    plain = make_model()
    x, _ = batch()
    other = {"0.weight": nn.Parameter(plain[0].weight.detach() * 2)}
    for inference in (True, False):
        with torch.set_grad_enabled(not inference):
            ours = torch.func.functional_call(pipe, other, (x,))
            theirs = torch.func.functional_call(plain, other, (x,))
        torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(output.square().sum(), other["0.weight"])[0] for output in (ours, theirs)]
    torch.testing.assert_close(*gradients)
