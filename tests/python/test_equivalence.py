"""A pipeline trains like its model, with PyTorch's tools around it."""

import contextvars
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gpipe
from helpers import gradients, make_tied_model, results_of, tied_batch


def train_in_parallel(ranks):
    pipe = gpipe.GPipe(make_tied_model(), [1, 3, 3], devices=["cpu"] * 3, chunks=2, checkpoint="never", schedule="zb_h1")
    module, whole = nn.ModuleList([pipe]), make_tied_model()
    module.forward = lambda x, y: pipe.compute_loss(x, y, F.cross_entropy)
    parallel = nn.parallel.DistributedDataParallel(module)
    for step in range(2):
        parallel.zero_grad()
        whole.zero_grad()
        parallel(*(tensor.chunk(2)[ranks.rank] for tensor in tied_batch(step))).backward()
        x, y = tied_batch(step)
        F.cross_entropy(whole(x), y).backward()
        torch.testing.assert_close(gradients(pipe), gradients(whole))


def test_distributed_data_parallel_averages_the_gradients():
    results_of(2, train_in_parallel)


MODES = ["never", "always"]
variable = contextvars.ContextVar("variable", default=1.0)


def test_layers_and_losses_see_the_callers_context():
    class Contextual(nn.Module):
        def forward(self, x):
            factor = variable.get()
            variable.set(100.0)  # stays in this cell
            return x * factor

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(3, 3), Contextual()), [1, 1], chunks=2, checkpoint="always")
    x = torch.ones(4, 3)
    token = variable.set(3.0)
    out = pipe(x)
    loss = pipe.step(x, x, gpipe.Loss(lambda output, target: output.sum() * variable.get(), reduction="sum"))
    variable.reset(token)
    torch.testing.assert_close(loss, 3 * out.sum().detach())
    pipe.zero_grad()
    out.sum().backward()  # recomputes in the context of the forward
    torch.testing.assert_close(pipe[0].bias.grad, torch.full((3,), 12.0))
    assert variable.get() == 1.0


def test_a_loss_with_reentrant_checkpoints_leaves_gradients_alone():
    class Reentrant(nn.Linear):
        def forward(self, x):
            return torch_checkpoint(super().forward, x, use_reentrant=True)

    model = nn.Sequential(nn.Linear(3, 3), Reentrant(3, 3), Reentrant(3, 3))
    x, target = torch.rand(4, 3), torch.rand(4, 3)
    nn.functional.mse_loss(model(x), target).backward()
    expected = copy.deepcopy(gradients(model))
    pipe = gpipe.GPipe(model, [2, 1], chunks=2, checkpoint="always")
    loss = pipe.compute_loss(x, target, nn.functional.mse_loss)
    assert all(map(torch.equal, gradients(model), expected))
    loss.backward()
    torch.testing.assert_close(gradients(model), [2 * each for each in expected])
    pipe.zero_grad()
    pipe.step(x, target, nn.functional.mse_loss)
    torch.testing.assert_close(gradients(model), expected)


class Named(torch.Tensor):
    pass


def test_subclasses_of_tensor_keep_their_class_or_are_refused():
    classes, x = set(), torch.rand(4, 3)
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], chunks=2, checkpoint="always")
    pipe[1].register_forward_pre_hook(lambda layer, inputs: classes.add(type(inputs[0])))
    plain, out = pipe(x), pipe(x.as_subclass(Named))
    assert type(out) is Named and torch.equal(out.as_subclass(torch.Tensor), plain)
    assert classes == {torch.Tensor, Named}
    loss = pipe.step(x.as_subclass(Named), x, nn.functional.mse_loss)
    expected = gradients(pipe)
    pipe.zero_grad()
    assert type(loss) is torch.Tensor and torch.equal(loss, pipe.step(x, x, nn.functional.mse_loss))
    assert all(map(torch.equal, expected, gradients(pipe)))
    with pytest.raises(TypeError, match="a FakeTensor cannot enter or leave a stage"):
        pipe(FakeTensorMode().from_tensor(torch.rand(4, 3)))
    annotated = torch.rand(4, 3).as_subclass(Named)
    annotated.note = "left"
    with pytest.raises(TypeError, match="a Named cannot enter or leave a stage"):
        pipe(annotated)


class Auxiliary(nn.Linear):
    """Keeps a loss of its own as an attribute."""

    def forward(self, x):
        y = super().forward(x)
        self.auxiliary = y.square().mean()
        self.last = y.detach()
        return y


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_that_a_layer_keeps_is_for_losses_of_the_last_stage_only(mode):
    layer, (x, target) = Auxiliary(3, 3), torch.rand(2, 4, 3)
    pipe = gpipe.GPipe(nn.Sequential(layer, nn.Linear(3, 3)), [1, 1], chunks=2, checkpoint=mode)
    for _ in range(3):
        out = pipe(torch.rand(4, 3))
        with pytest.raises(RuntimeError, match="a backward reached|second time"):
            (out.sum() + layer.auxiliary).backward()
        pipe.zero_grad()
        pipe(torch.rand(4, 3)).sum().backward()  # a kept tensor that is not used changes nothing
        (layer.last.sum() * pipe[1].weight).sum().backward()

    def criterion(output, target):
        return nn.functional.mse_loss(output, target) + layer.auxiliary

    model = nn.Sequential(nn.Linear(3, 3), layer)
    model.zero_grad()
    criterion(model(x), target).backward()
    expected = gradients(model)
    pipe = gpipe.GPipe(model, [1, 1], chunks=2, checkpoint=mode, schedule="1f1b")
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, target, criterion)
        torch.testing.assert_close(gradients(model), expected)
