"""A pipeline trains like its model, with PyTorch's tools around it."""

import contextvars
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.data import DataLoader, TensorDataset

import gpipe
from helpers import Double, make_tied_model, results_of, tied_batch


def test_autocast_and_grad_modes_reach_the_layers():
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2), Double()), [1, 1], chunks=2)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert pipe(torch.rand(4, 2)).dtype == dtype
    assert pipe(torch.rand(4, 2)).dtype == torch.float32
    with torch.no_grad():
        assert not pipe(torch.rand(4, 2)).requires_grad
    with torch.inference_mode():
        assert pipe(torch.rand(4, 2)).is_inference()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_scripted_layers_train_the_same():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1))
    scripted = nn.Sequential(torch.jit.script(copy.deepcopy(model[0])), copy.deepcopy(model[1]))
    x = torch.rand(8, 4)
    pipes = [gpipe.GPipe(each, [1, 1], chunks=2, checkpoint="always") for each in (model, scripted)]
    for pipe in pipes:
        pipe(x).sum().backward()
    states, gradients = ([dict(pipe.state_dict()) for pipe in pipes], [[p.grad for p in pipe.parameters()] for pipe in pipes])
    torch.testing.assert_close(list(states[1].values()), list(states[0].values()))
    torch.testing.assert_close(*gradients)


class Loss(nn.Module):
    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def forward(self, x, y):
        return self.pipe.loss(x, y, F.cross_entropy)


def train_in_parallel(ranks):
    pipe = gpipe.GPipe(make_tied_model(), [1, 3, 3], devices=["cpu"] * 3, chunks=2, checkpoint="always")
    parallel, whole = nn.parallel.DistributedDataParallel(Loss(pipe)), make_tied_model()
    for step in range(2):
        parallel.zero_grad()
        whole.zero_grad()
        parallel(*(tensor.chunk(2)[ranks.rank] for tensor in tied_batch(step))).backward()
        x, y = tied_batch(step)
        F.cross_entropy(whole(x), y).backward()
        for ours, theirs in zip(pipe.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_distributed_data_parallel_averages_the_gradients():
    results_of(2, train_in_parallel)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def make_loader():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.rand(16, 4), torch.rand(16, 1)), batch_size=8)


def train(model, optimizer, loader, backward, clip):
    for x, y in loader:
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        clip()
        optimizer.step()


def trained_without_framework():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(model, optimizer, make_loader(), torch.Tensor.backward, clip)
    return model.state_dict()


def accelerate_tools(folder):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    pipe = gpipe.GPipe(make_model(), [1, 2], chunks=2)
    model, optimizer, loader = accelerator.prepare(pipe, torch.optim.Adam(pipe.parameters(), 0.01), make_loader())

    def clip():
        accelerator.clip_grad_norm_(model.parameters(), 0.1)

    state = lambda: accelerator.get_state_dict(model)
    save, load = lambda: accelerator.save_state(folder), lambda: accelerator.load_state(folder)
    return (model, optimizer, loader, accelerator.backward, clip), state, save, load


def lightning_tools(folder):
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    pipe = gpipe.GPipe(make_model(), [1, 2], chunks=2)
    model, optimizer = fabric.setup(pipe, torch.optim.Adam(pipe.parameters(), 0.01))
    saved = {"model": model, "optimizer": optimizer}

    def clip():
        fabric.clip_gradients(model, optimizer, max_norm=0.1)

    save, load = lambda: fabric.save(folder / "file", saved), lambda: fabric.load(folder / "file", saved)
    return (model, optimizer, fabric.setup_dataloaders(make_loader()), fabric.backward, clip), pipe.state_dict, save, load


@pytest.mark.parametrize("tools", [accelerate_tools, lightning_tools])
def test_a_framework_trains_the_same_and_restores_a_state(tools, tmp_path):
    training, state_of, save, load = tools(tmp_path)
    train(*training)
    state = copy.deepcopy(dict(state_of()))
    torch.testing.assert_close(state, dict(trained_without_framework()))
    save()
    train(*training)
    load()
    torch.testing.assert_close(dict(state_of()), state, rtol=0, atol=0)


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
    loss = pipe.step(x, x, lambda output, target: output.sum() * variable.get(), reduction="sum")
    variable.reset(token)
    torch.testing.assert_close(loss, 3 * out.sum().detach())
    pipe.zero_grad()
    out.sum().backward()  # recomputes in the context of the forward
    torch.testing.assert_close(pipe[0].bias.grad, torch.full((3,), 12.0))
    assert variable.get() == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_with_reentrant_checkpoints_leaves_gradients_alone(mode):
    class Reentrant(nn.Linear):
        def forward(self, x):
            return torch_checkpoint(super().forward, x, use_reentrant=True)

    model = nn.Sequential(nn.Linear(3, 3), Reentrant(3, 3), Reentrant(3, 3))
    x, target = torch.rand(4, 3), torch.rand(4, 3)
    nn.functional.mse_loss(model(x), target).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    pipe = gpipe.GPipe(model, [2, 1], chunks=2, checkpoint=mode)
    loss = pipe.loss(x, target, nn.functional.mse_loss)
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), expected))
    loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [2 * each for each in expected])
    pipe.zero_grad()
    pipe.step(x, target, nn.functional.mse_loss)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


class Named(torch.Tensor):
    """Counts the functions that are called with it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Named.calls += 1
        return super().__torch_function__(function, types, args, kwargs)


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError


class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.classes = set()

    def forward(self, x):
        self.classes.add(type(x))
        return self.linear(x)


@pytest.mark.parametrize("mode", MODES)
def test_subclasses_of_tensor_keep_their_class(mode):
    model = nn.Sequential(Notes(), Notes())
    pipe = gpipe.GPipe(model, [1, 1], chunks=2, checkpoint=mode)
    x = torch.rand(4, 3)
    plain, out = pipe(x), pipe(x.as_subclass(Named))
    assert type(out) is Named and torch.equal(out.as_subclass(torch.Tensor), plain)
    assert model[0].classes == model[1].classes == {torch.Tensor, Named}
    loss = pipe.step(x.as_subclass(Named), x, nn.functional.mse_loss)
    gradients = [parameter.grad.clone() for parameter in pipe.parameters()]
    pipe.zero_grad()
    assert type(loss) is torch.Tensor and torch.equal(loss, pipe.step(x, x, nn.functional.mse_loss))
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in pipe.parameters()]))


def test_subclasses_that_cannot_cross_are_refused():
    pipe = gpipe.GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1])
    with pytest.raises(TypeError, match="a Wrapper cannot enter or leave a stage"):
        pipe(torch.Tensor._make_wrapper_subclass(Wrapper, (4, 3)))
    annotated = torch.rand(4, 3).as_subclass(Named)
    annotated.note = "left"
    with pytest.raises(TypeError, match="a Named cannot enter or leave a stage"):
        pipe(annotated)

    @gpipe.skip.skippable(stash=["a"])
    class StashNamed(nn.Module):
        def forward(self, x):
            gpipe.skip.stash("a", x.as_subclass(Named))
            return x

    with pytest.raises(TypeError, match="'a' must be a torch.Tensor or None"):
        StashNamed()(torch.rand(2))


class Auxiliary(nn.Module):
    """Keeps a loss of its own as an attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.auxiliary = None
        self.last = None

    def forward(self, x):
        y = self.linear(x)
        self.auxiliary = y.square().mean()
        self.last = y.detach()
        return y


@pytest.mark.parametrize("mode", MODES)
def test_a_kept_tensor_is_never_a_silent_constant(mode):
    layer = Auxiliary()
    pipe = gpipe.GPipe(nn.Sequential(layer, nn.Linear(3, 3)), [1, 1], chunks=2, checkpoint=mode)
    for _ in range(3):
        out = pipe(torch.rand(4, 3))
        with pytest.raises(RuntimeError, match="a backward reached|second time"):
            (out.sum() + layer.auxiliary).backward()
        pipe.zero_grad()
        pipe(torch.rand(4, 3)).sum().backward()  # a kept tensor that is not used changes nothing
        (layer.last.sum() * pipe[1].weight).sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_may_use_a_tensor_that_the_last_stage_keeps(mode):
    layer = Auxiliary()
    model = nn.Sequential(nn.Linear(3, 3), layer)
    x, target = torch.rand(4, 3), torch.rand(4, 3)

    def criterion(output, target):
        return nn.functional.mse_loss(output, target) + layer.auxiliary

    criterion(model(x), target).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    pipe = gpipe.GPipe(model, [1, 1], chunks=2, checkpoint=mode, schedule="1f1b")
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, target, criterion)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
