"""Parameters, buffers and states have the names of the unpartitioned model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import gpipe
from gpipe.batchnorm import DeferredBatchNorm
from gpipe.skip import skippable, stash
from helpers import Add, gradients, make_tied_model, results_of, tied_batch, training_step
from small_models import batch, make_net


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Named(nn.Module):
    """Has modules, parameters or buffers of some names, and a child that has them too."""

    def __init__(self, names, make, inner):
        super().__init__()
        self._linear, self.inner, self.used = nn.Linear(3, 3), inner, names
        for name in names:
            setattr(self, name, make())

    def forward(self, x):
        x = self.inner(self._linear(x))
        for own in [getattr(self, name) for name in self.used]:
            x = own(x) + own.bias if isinstance(own, nn.Module) else x + own
        return x


@pytest.mark.parametrize(
    ("make", "native"), [(lambda: nn.Parameter(torch.ones(3)), False), (lambda: nn.Buffer(torch.ones(3)), True)]
)
def test_a_converted_model_may_have_the_names_of_what_a_pipeline_has(make, native):
    x = torch.randn(4, 3)
    small = gpipe.to_sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), x)
    taken = [*vars(gpipe.GPipe(small, [2])), *vars(gpipe.GPipe), *vars(small), "original", "own"]
    names = [name for name in dict.fromkeys(taken) if not hasattr(nn.Sequential(), name)]
    assert {"balance", "chunks", "partitions", "step"} <= set(names)
    few = "_sequence", "guards", "original", "own"
    model = Named(names, make, Named(few, lambda: nn.Linear(3, 3), nn.Tanh()))
    sequence = gpipe.to_sequential(model, x, native=native)
    pipe = gpipe.GPipe(sequence, [1, len(sequence) - 1], chunks=2)
    torch.testing.assert_close(pipe(x), model(x))
    assert list(pipe.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(copy.deepcopy(pipe)(x), model(x))
    pipe._linear = linear = nn.Linear(3, 3)
    assert model._linear is linear


def test_attributes_and_methods_are_those_of_the_model():
    class Scaled(nn.Sequential):
        scale = 2.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model, x = Scaled(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3)
    pipe = gpipe.GPipe(gpipe.to_sequential(model, x), [1, 1], chunks=2)
    assert pipe.scale == 2 and pipe.append == model.append
    assert not hasattr(pipe, "no_weight_decay")
    pipe.scale = 3.0
    assert model.scale == 3
    with pytest.raises(RuntimeError, match="scale"):
        pipe(x)
    del pipe.scale
    assert model.scale == 2 and torch.equal(pipe(x), model(x))


def scaled(state):
    return {key: (value * 1.5 if value.is_floating_point() else value).detach().clone() for key, value in state.items()}


@pytest.mark.parametrize("make", [make_model, make_tied_model, make_net])
def test_names_and_states_are_those_of_the_unpartitioned_model(make):
    plain = make()
    layers = [gpipe.to_sequential(make(), batch()) if make is make_net else make() for _ in range(2)]
    pipe, other = (gpipe.GPipe(each, [first, len(each) - first]) for first, each in enumerate(layers, start=1))
    for what in ("named_parameters", "named_buffers", "state_dict"):
        assert list(dict(getattr(pipe, what)())) == list(dict(getattr(plain, what)()))
    assert next(pipe.named_parameters("x"))[0] == f"x.{next(plain.named_parameters())[0]}"
    duplicates = {"remove_duplicate": False}
    assert [*dict(pipe.named_parameters(**duplicates))] == [*dict(plain.named_parameters(**duplicates))]
    state = pipe.state_dict()
    assert set(state._metadata) >= set(plain.state_dict()._metadata)
    changed = scaled(state)
    other.load_state_dict(changed)
    assert all(torch.equal(value, changed[key]) for key, value in other.state_dict().items())
    other.load_state_dict({f"partitions.1.{name}": value for name, value in state.items()})  # as torchgpipe saves it
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    assert list(pipe.state_dict(None, "x.")) == [f"x.{key}" for key in state]
    nested = nn.ModuleDict({"pipe": pipe})
    assert list(nested.state_dict()) == [f"pipe.{key}" for key in state]
    nested.load_state_dict(nested.state_dict())
    first = next(iter(state))
    state["more"] = state.pop(first)
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{first}"(.|\n)*: "more"'):
        other.load_state_dict(state)


@skippable(stash=["skip"])
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.BatchNorm1d(2))

    def forward(self, x):
        stash("skip", x)
        return self.block(x)


def test_states_saved_by_torchgpipe_can_be_loaded():
    """It adds the stage, `module` for each skippable layer, and sums of deferred batch norms to the names."""
    pipe = gpipe.GPipe(nn.Sequential(Wrapped(), Add()), [1, 1], deferred_batch_norm=True)
    saved = scaled(pipe.state_dict())
    sums = {"sum": torch.zeros(2), "sum_squares": torch.zeros(2)}
    other_cut = {name.replace("0.block", "partitions.3.0.module.block"): value for name, value in saved.items()}
    pipe.load_state_dict(other_cut | {f"partitions.3.0.module.block.0.{name}": value for name, value in sums.items()})
    assert all(map(torch.equal, pipe.state_dict().values(), saved.values()))
    norm = DeferredBatchNorm(2)
    norm.load_state_dict({**norm.state_dict(), **sums})


def test_functional_call_computes_the_same_with_a_pipeline():
    model, pipe = make_model().double(), gpipe.GPipe(make_model().double(), [2, 2], checkpoint="never")
    before = copy.deepcopy(pipe.state_dict())
    x = torch.rand(6, 3, dtype=torch.float64)
    results = []
    for module in (model, pipe):
        state = scaled(before)
        leaves = [state[name].requires_grad_() for name, _ in model.named_parameters()]
        y = functional_call(module, state, (x,), strict=True)
        y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves), state["1.running_mean"]])
    torch.testing.assert_close(results[1], results[0])
    pipe.checkpoint = "always"
    y = functional_call(pipe, state, (x,))
    with pytest.raises(RuntimeError, match="parameters of layer '[03]' were replaced between"):
        y.sum().backward()  # when it recomputes, the layers have their own parameters again
    assert all(torch.equal(value, before[key]) for key, value in pipe.state_dict().items())
    assert pipe[0].weight.grad is None


def test_distributed_checkpoints_are_those_of_the_unpartitioned_model():
    """Model and optimizer states pass in both directions."""
    torch.manual_seed(1)
    x = torch.rand(6, 3)
    model, pipe = make_model(), gpipe.GPipe(make_model(), [1, 3])
    optimizers = torch.optim.Adam(model.parameters()), torch.optim.Adam(pipe.parameters())
    (model(x).square().sum() + model(-x).square().sum()).backward()
    optimizers[0].step()
    state = copy.deepcopy(dcp.get_state_dict(model, optimizers[0]))
    dcp.set_state_dict(pipe, optimizers[1], model_state_dict=state[0], optim_state_dict=state[1])
    back = dcp.get_state_dict(pipe, optimizers[1])
    assert list(back[0]) == list(state[0]) and list(back[1]["state"]) == list(state[1]["state"])
    assert back[1]["param_groups"] == state[1]["param_groups"]
    torch.testing.assert_close(dict(back[0]), dict(state[0]), rtol=0, atol=0)
    torch.testing.assert_close(back[1]["state"], state[1]["state"], rtol=0, atol=0)
    full = dcp.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    assert list(dcp.get_state_dict(pipe, optimizers[1], options=full)[1])[0].startswith("state.0.weight.")


def shard(ranks):
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    batches = torch.rand(3, 2, 4, 4)
    pipe = gpipe.GPipe(copy.deepcopy(model), [1, 1], chunks=2, checkpoint="always")
    fully_shard(pipe, mesh=mesh, reshard_after_forward=True)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (pipe, model)]

    def mean(output, target):
        return output.square().mean()

    def train(loss):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for parts in batches:
            loss(parts[ranks.rank]).backward()
            (sum(mean(model(part), None) for part in parts) / 2).backward()
        torch.testing.assert_close([each.full_tensor() for each in gradients(pipe)], gradients(model))
        for optimizer in optimizers:
            optimizer.step()

    train(lambda x: mean(pipe(x), None))
    for call in (pipe.step, pipe.compute_loss):
        with pytest.raises(RuntimeError, match=r"register_fsdp_forward_method\(pipe, 'compute_loss'\)"):
            call(batches[0, 0], batches[0, 0], mean)
    register_fsdp_forward_method(pipe, "compute_loss")
    train(lambda x: pipe.compute_loss(x, x, mean))
    torch.testing.assert_close([each.full_tensor() for each in pipe.parameters()], list(model.parameters()))

    refused = gpipe.GPipe(copy.deepcopy(model), [1, 1])
    fully_shard(refused[1][0], mesh=mesh)
    with pytest.raises(RuntimeError, match="is sharded"):
        refused(batches[0, 0])


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
    with pytest.raises(RuntimeError, match="inside DistributedDataParallel.* replicas"):
        pipe.step(x, y, F.cross_entropy)


def wrap(ranks):
    train_in_parallel(ranks)
    shard(ranks)


def test_distributed_data_parallel_and_fsdp_average_the_gradients():
    results_of(2, wrap)


def test_layers_can_be_tied_and_untied_later():
    models = gpipe.GPipe(make_tied_model(), [1, 3, 3], chunks=2, checkpoint="always"), make_tied_model()
    x, _ = tied_batch()
    for change in (
        lambda model: None,
        lambda model: setattr(model[6], "weight", nn.Parameter(model[6].weight.detach() * 2)),
        lambda model: setattr(model[6], "weight", model[0].weight),
        lambda model: model.load_state_dict(make_tied_model().state_dict(), assign=True),  # unties
    ):
        for model in models:
            change(model)
        torch.testing.assert_close(*(training_step(model, x) for model in models))
