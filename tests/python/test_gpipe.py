"""What is checked, and what a pipeline looks like from outside."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gpipe
from layers import Double


def model(layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))


CPUS = ["cpu"] * 4


def test_attributes():
    layers = model()
    pipe = gpipe.GPipe(layers, [1, 3], devices=CPUS, chunks=42.0, checkpoint="always")
    assert pipe.balance == [1, 3]
    assert pipe.devices == [torch.device("cpu")] * 2
    assert pipe.chunks == 42
    assert pipe.checkpoint == "always"
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert [len(partition) for partition in pipe.partitions] == [1, 3]
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
    assert len(pipe) == 4
    assert list(pipe) == list(layers)
    assert pipe[0] is layers[0]
    assert pipe[-1] is layers[3]
    with pytest.raises(IndexError):
        pipe[4]
    with pytest.raises(TypeError):
        pipe[1:]
    assert "partitions.1.3" in dict(pipe.named_modules())


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"balance": None}, ValueError, r"balance is required(.|\n)*gpipe\.balance"),
        ({"chunks": 0}, ValueError, "number of chunks must be positive integer"),
        ({"chunks": -1}, ValueError, "number of chunks must be positive integer"),
        ({"chunks": 2.5}, TypeError, "number of chunks must be an integer, but is 2.5"),
        ({"chunks": True}, TypeError, "number of chunks must be an integer, but is True"),
        ({"chunks": "2"}, TypeError, "number of chunks must be an integer, but is '2'"),
        ({"chunks": None}, TypeError, "number of chunks must be an integer, but is None"),
        ({"checkpoint": "INVALID"}, ValueError, "checkpoint is not one of 'always', 'except_last', or 'never'"),
        ({"checkpoint": None}, TypeError, "checkpoint must be one of 'always', .*, but is None"),
        ({"balance": 2}, TypeError, r"balance must be a list .*, but is 2(.|\n)*gpipe\.balance"),
        ({"balance": [2.0, 2]}, TypeError, "each number of a balance must be an integer, but is 2.0"),
        ({"balance": [3, True]}, TypeError, "each number of a balance must be an integer, but is True"),
        ({"balance": [2]}, ValueError, r"have different length \(module: 4, sum of balance: 2\)"),
        ({"balance": [4, 0]}, ValueError, r"all balance numbers must be positive integer \(balance: \[4, 0\]\)"),
        ({"devices": ["cpu"]}, IndexError, r"too few devices to hold given partitions \(devices: 1, partitions: 2\)"),
        ({"devices": "cpu"}, TypeError, "devices must be a list, with a device for each stage, but is 'cpu'"),
        ({"devices": torch.device("cpu")}, TypeError, r"devices must be a list.* but is device\(type='cpu'\)"),
        ({"devices": [True, True]}, TypeError, "a device must be .*, but is True"),
        ({"devices": ["cuda:99"] * 2}, IndexError, "cuda:99"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        gpipe.GPipe(model(), **{"balance": [2, 2], **arguments})


def test_refuses_modules():
    with pytest.raises(TypeError, match="module must be nn.Sequential to be partitioned"):
        gpipe.GPipe(nn.ModuleList([nn.Linear(1, 1)]), [1])
    layer = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        gpipe.GPipe(nn.Sequential(layer, layer), [1, 1])
    other = nn.Linear(3, 3)
    other.weight = layer.weight
    with pytest.raises(ValueError, match="module with duplicate parameters in distinct children is not supported"):
        gpipe.GPipe(nn.Sequential(layer, other), [2])


class Doubling(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


def forward_of_its_own(layers):
    layers.forward = Doubling.forward


@pytest.mark.parametrize("change", [lambda layers: layers.compile(), forward_of_its_own])
def test_refuses_models_that_do_more_than_their_layers(change):
    layers = model()
    change(layers)
    for changed in (layers, Doubling(*layers)):
        with pytest.raises(TypeError, match=f"the model \\({type(changed).__name__}\\) has a forward of its own"):
            gpipe.GPipe(changed, [2, 2])
    gpipe.GPipe(nn.Sequential(*layers), [2, 2])


@pytest.mark.parametrize(
    "register, lost",
    [
        (nn.Module.register_forward_pre_hook, "a forward pre-hook"),
        (nn.Module.register_forward_hook, "a forward hook"),
        (nn.Module.register_full_backward_pre_hook, "a backward pre-hook"),
        (nn.Module.register_full_backward_hook, "a backward hook"),
        (nn.Module.register_backward_hook, "a backward hook"),
        (nn.Module.register_state_dict_pre_hook, "a state-dict pre-hook"),
        (nn.Module.register_state_dict_post_hook, "a state-dict hook"),
        (nn.Module.register_load_state_dict_pre_hook, "a load-state-dict pre-hook"),
        (nn.Module.register_load_state_dict_post_hook, "a load-state-dict post-hook"),
        (lambda layers, _: layers.register_parameter("scale", nn.Parameter(torch.ones(1))), r"a parameter \('scale'\)"),
        (lambda layers, _: layers.register_buffer("offset", torch.ones(1)), r"a buffer \('offset'\)"),
    ],
)
def test_refuses_what_belongs_to_no_layer(register, lost):
    layers = model()
    register(layers, lambda *arguments: None)
    with pytest.raises(ValueError, match=f"the model itself, not one of its layers, has {lost}, which .* would lose"):
        gpipe.GPipe(layers, [2, 2])


def test_refuses_lazy_layers_until_they_have_run():
    for lazy, name in ((nn.LazyLinear(3), "weight"), (nn.LazyBatchNorm1d(affine=False), "running_mean")):
        layers = nn.Sequential(lazy)
        with pytest.raises(ValueError, match=f"'0.{name}' is not initialised yet.*run the unpartitioned model once"):
            gpipe.GPipe(layers, [1])
        layers(torch.rand(4, 3))
        gpipe.GPipe(layers, [1])(torch.rand(4, 3))


@pytest.mark.parametrize("input", [[1], {"a": "text"}, None, "text", 1, (torch.zeros(1), 2), torch.Size([1])])
def test_refuses_inputs(input):
    with pytest.raises(TypeError, match="expected Tensor, but got"):
        gpipe.GPipe(model(), [4])(input)


def test_refuses_odd_tensors():
    pipe = gpipe.GPipe(nn.Sequential(Double()), [1], chunks=2)
    with pytest.raises(ValueError, match="no dimensions"):
        pipe(torch.tensor(1.0))
    with pytest.raises(ValueError, match="unequal batch sizes"):
        pipe((torch.zeros(8), torch.zeros(3)))
    with pytest.raises(TypeError):
        pipe(torch.zeros(1), torch.zeros(1))


def test_empty():
    pipe = gpipe.GPipe(nn.Sequential(), [])
    x = torch.zeros(2)
    assert pipe(x) is x
    with pytest.raises(TypeError):
        pipe([1])


def test_denies_to_move():
    pipe = gpipe.GPipe(model(), [2, 2])
    moves = [
        lambda: pipe.cuda(),
        lambda: pipe.cuda(0),
        lambda: pipe.xpu(),
        lambda: pipe.to("meta"),
        lambda: pipe.to(0),
        lambda: pipe.to(torch.device("meta")),
        lambda: pipe.to(torch.zeros(1, device="meta")),
        lambda: pipe.to(device="meta"),
        lambda: pipe.to("meta", torch.float64),
        lambda: pipe.to(tensor=torch.zeros(1, device="meta")),
        lambda: pipe.to_empty(device="cpu"),
    ]
    for move in moves:
        with pytest.raises(TypeError, match="denied to move parameters and buffers"):
            move()
    assert next(pipe.parameters()).dtype == torch.float32
    pipe[0].to("meta")
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        pipe.cpu()


def test_stays_where_it_is():
    pipe = gpipe.GPipe(model(), [2, 2])
    weight = pipe[0].weight
    for move in (
        lambda: pipe.cpu(),
        lambda: pipe.to("cpu"),
        lambda: pipe.to(torch.device("cpu", 0)),
        lambda: pipe.to(device="cpu", non_blocking=True),
        lambda: pipe.to(torch.zeros(1)),
    ):
        assert move() is pipe
        assert pipe[0].weight is weight and weight.dtype == torch.float32
    assert pipe.to("cpu", torch.float64) is pipe
    assert pipe(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64


def test_changes_of_dtype():
    pipe = gpipe.GPipe(model(), [2, 2])
    assert pipe.to(torch.float64) is pipe
    assert next(pipe.parameters()).dtype == torch.float64
    assert pipe(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64
    pipe.half()
    assert next(pipe.parameters()).dtype == torch.float16
    pipe.to(dtype=torch.float32)
    assert pipe(torch.zeros(2, 3)).dtype == torch.float32


@pytest.mark.parametrize(
    "batch, chunks, expected", [(5, 4, [2, 2, 1]), (2, 4, [1, 1]), (7, 4, [2, 2, 2, 1]), (0, 4, [0])]
)
def test_micro_batches(batch, chunks, expected):
    sizes = []

    class Note(nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return x

    out = gpipe.GPipe(nn.Sequential(Note()), [1], chunks=chunks)(torch.zeros(batch, 3))
    assert out.shape == (batch, 3)
    assert sizes == expected


def test_options_may_change():
    pipe = gpipe.GPipe(model(), [2, 2], chunks=1)
    x = torch.rand(8, 3)
    expected = pipe(x)
    for chunks in (8, 3):
        pipe.chunks = chunks
        pipe.checkpoint = "always"
        torch.testing.assert_close(pipe(x), expected)
    with pytest.raises(ValueError):
        pipe.chunks = 0
    with pytest.raises(ValueError):
        pipe.checkpoint = "sometimes"


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies(copies):
    pipe = gpipe.GPipe(model(), [2, 2], chunks=2)
    x = torch.rand(4, 3)
    expected = pipe(x)
    twin = copies(pipe)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert torch.equal(pipe(x), expected)
    assert not torch.equal(twin(x), expected)


def test_state_dict():
    layers = model()
    keys = list(layers.state_dict())
    pipe = gpipe.GPipe(layers, [1, 3])
    state = pipe.state_dict()
    assert list(state) == keys
    assert set(state._metadata) >= set(layers.state_dict()._metadata)
    other = gpipe.GPipe(model(), [2, 2])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    assert all(torch.equal(other.state_dict()[key], state[key]) for key in keys)

    cut_otherwise = {f"partitions.{0 if i < 3 else 1}.{key}": state[key] for i, key in enumerate(keys)}
    other[0].weight.data.zero_()
    other.load_state_dict(cut_otherwise)
    assert torch.equal(other[0].weight, pipe[0].weight)

    assert list(pipe.state_dict(None, "x.")) == [f"x.{key}" for key in keys]
    nested = nn.ModuleDict({"pipe": pipe})
    assert list(nested.state_dict()) == [f"pipe.{key}" for key in keys]
    nested.load_state_dict(nested.state_dict())

    missing = dict(state)
    del missing["0.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.weight"'):
        other.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "extra\.weight"'):
        other.load_state_dict({**state, "extra.weight": torch.zeros(1)})


def test_versions_of_states():
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [1, 1])
    for state in (pipe.state_dict(), nn.Sequential(*copy.deepcopy(list(pipe))).state_dict()):
        del state["1.num_batches_tracked"]  # which a state of that version cannot lack
        with pytest.raises(RuntimeError, match=r'"1\.num_batches_tracked"'):
            pipe.load_state_dict(state)


def replace_in_its_stage(pipe):
    pipe.partitions[1][1] = Double()


def replace_by_name(pipe):
    setattr(pipe, "3", Double())


@pytest.mark.parametrize("replace", [replace_in_its_stage, replace_by_name])
def test_layers_may_be_replaced(replace):
    pipe = gpipe.GPipe(model(), [2, 2], chunks=2)
    x = torch.rand(4, 3)
    pipe(x)
    replace(pipe)
    assert isinstance(pipe[3], Double) and set(dict(pipe.named_children())) == {"partitions"}
    expected = nn.Sequential(*pipe)(x)
    y = pipe(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()


def test_hooks():
    pipe = gpipe.GPipe(model(), [2, 2], chunks=2, checkpoint="never")
    seen = []
    pipe.register_forward_hook(lambda module, args, output: seen.append("pipe"))
    pipe.partitions[1].register_forward_pre_hook(lambda module, args: seen.append("before 1"))
    pipe[3].register_forward_hook(lambda module, args, output: seen.append("after 3"))
    pipe[0].weight.register_hook(lambda gradient: seen.append("gradient"))
    pipe(torch.rand(4, 3)).sum().backward()
    assert seen == ["before 1", "after 3"] * 2 + ["pipe", "gradient"]


def test_timeline():
    pipe = gpipe.GPipe(model(), [2, 2], chunks=3, checkpoint="always")
    timeline = gpipe.Timeline()
    pipe.trace(timeline)
    pipe(torch.rand(6, 3)).sum().backward()
    pipe.trace(None)
    assert timeline.workers == 2
    assert timeline.makespan() > 0
    assert timeline.to_svg().count("<title>") == 18
    assert '"traceEvents"' in timeline.to_chrome_json()
