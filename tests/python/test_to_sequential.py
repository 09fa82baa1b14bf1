"""Conversion of modules to sequences: structure, names, inputs and outputs."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import gpipe
from converted_models import Returns, batch, make_net, outputs_in_each_mode
from gpipe.balance import balance_by_time, suggest
from gpipe.skip import verify_skippables


def names_of(sequence):
    return [layer.name for layer in sequence]


def test_layers_are_named_after_modules():
    sequence = gpipe.to_sequential(make_net(), batch())
    block = ["linear", "norm", "act"]
    assert names_of(sequence) == [
        *(f"first.{name}" for name in block),
        "first",  # its own parameter
        "first.act_1",
        *(f"second.{name}" for name in block),
        "second",
        "second.act_1",
        "drop",
        "head",
    ]
    assert list(dict(sequence.named_children()))[:2] == ["first_linear", "first_norm"]
    assert names_of(gpipe.to_sequential(make_net().requires_grad_(False), batch())) == names_of(sequence)
    # The input of a block is a skip to its sum.
    stashed = {name for layer in sequence for name in layer.stashable_names}
    assert stashed == {"first.linear -> first", "second.linear -> second"}


def test_tensors_are_the_modules_own_under_its_names():
    net = make_net()
    sequence = gpipe.to_sequential(net, batch())
    assert {name: id(tensor) for name, tensor in sequence.named_parameters()} == {
        name: id(tensor) for name, tensor in net.named_parameters()
    }
    assert dict(sequence.named_buffers()).keys() == dict(net.named_buffers()).keys()
    assert sequence.state_dict().keys() == net.state_dict().keys()
    other = make_net()
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1)
    sequence.load_state_dict(other.state_dict())
    assert torch.equal(net.head.weight, other.head.weight)
    pipe = gpipe.GPipe(sequence, [5, len(sequence) - 5])
    assert pipe.state_dict().keys() == net.state_dict().keys()
    assert dict(pipe.named_parameters()).keys() == dict(net.named_parameters()).keys()
    other.load_state_dict(pipe.state_dict())
    state = dict(net.state_dict())
    state["more"] = state.pop("first.scale")
    for module in (sequence, pipe):
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "first.scale"(.|\n)*: "more"'):
            module.load_state_dict(state)
        for name, parameter in net.named_parameters():
            assert module.get_parameter(name) is parameter
        assert module.get_buffer("table") is net.table
        with pytest.raises(AttributeError, match="has no attribute `more`"):
            module.get_parameter("more.scale")
        with pytest.raises(AttributeError, match="has no attribute .head"):
            torch.func.functional_call(module, {"head.weight": net.head.weight * 2}, batch())
        nested = nn.ModuleDict({"inner": module})
        assert set(nested.state_dict()) == {f"inner.{name}" for name in net.state_dict()}
        nested.load_state_dict(nested.state_dict())


def test_any_number_of_samples():
    for example in (1, 3):
        sequence = gpipe.to_sequential(make_net(), batch(example)).eval()
        for samples in (1, 2, 7):
            assert torch.equal(sequence(batch(samples)), make_net().eval()(batch(samples)))


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


def test_one_sample_is_taken_where_only_operators_tell_it_from_more():
    x, y = torch.rand(2, 3, 1, 4, 4).double()
    model = Correlation(lambda x, output: output).double()
    pipe = gpipe.GPipe(gpipe.to_sequential(model, x, y), [1, 1], chunks=3)
    torch.testing.assert_close(pipe((x, y)), model(x, y))


def test_one_sample_that_the_code_treats_differently_is_refused():
    x, y = torch.rand(2, 3, 1, 4, 4).double()
    model = Correlation(lambda x, output: output if x.squeeze(0).dim() == 4 else 2 * output).double()
    sequence = gpipe.to_sequential(model, x, y)
    torch.testing.assert_close(sequence((x, y)), model(x, y))
    with pytest.raises(ValueError, match="a number of samples with .*, but a micro-batch has 1:"):
        sequence((x[:1], y[:1]))


def test_a_module_with_two_paths():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
            self.blocks = nn.ModuleList([self.act, nn.Linear(4, 4), self.act])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.act(x)

    model = Twice().double()
    sequence = gpipe.to_sequential(model, batch())
    assert sequence.state_dict().keys() == model.state_dict().keys()
    for outputs in outputs_in_each_mode(sequence, model, batch()):
        torch.testing.assert_close(*outputs)


class Pair(NamedTuple):
    sum: torch.Tensor
    rest: list


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, factor, *, mask=None, power=1):
        y = self.b(self.a(x) * mask) ** power
        return Pair(y + x, [None, {"y": y, "factor": factor}])


def test_inputs_and_outputs_are_trees():
    model = Several().double()
    x, mask = batch(), torch.rand(6, 4).double()
    sequence = gpipe.to_sequential(model, x, x + 1, mask=mask, power=2)
    pipe = gpipe.GPipe(sequence, [1, 1], chunks=3)
    expected = model(x, x + 1, mask=mask, power=2)
    for module in (sequence, pipe):
        output = module(((x, x + 1), {"mask": mask}))
        assert type(output) is Pair and output.rest[0] is None
        torch.testing.assert_close(output.sum, expected.sum)
        torch.testing.assert_close(output.rest[1], expected.rest[1])
    with pytest.raises(TypeError, match=r"another structure of the input: expected \(\(..., ...\), \{'mask': ...\}\), but got"):
        sequence((x, x))
    by_name = gpipe.to_sequential(model, x=x, factor=x, mask=mask)
    assert torch.equal(by_name({"x": x, "factor": x, "mask": mask}).sum, model(x, x, mask=mask).sum)


class AnyArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, *args, factor=1, **kwargs):
        return self.b(self.a(x)) * factor + sum(args) - kwargs.get("shift", 0) * kwargs.get("power", 1)


@pytest.mark.parametrize(
    ("positional", "names"),
    [(0, ["shift", "x"]), (1, ["power", "shift"]), (1, ["shift", "factor"]), (3, []), (3, ["shift"])],
)
def test_arguments_that_forward_does_not_name(positional, names):
    model = AnyArguments().double()
    args = tuple(batch() + i for i in range(positional))
    kwargs = {name: batch() * (i + 2) for i, name in enumerate(names)}
    sequence = gpipe.to_sequential(model, *args, **kwargs)
    input = (args, kwargs) if args and kwargs else kwargs or (args if positional > 1 else args[0])
    assert torch.equal(sequence(input), model(*args, **kwargs))
    assert "forward" not in vars(model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x)).tanh())


def test_tied_weights_cross_stages_as_skips():
    torch.manual_seed(0)
    model = Tied().double()
    plain = copy.deepcopy(model)
    pipe = gpipe.GPipe(gpipe.to_sequential(model, torch.arange(6).view(3, 2)), [1, 1, 1], chunks=2)
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
    optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (pipe, plain)]
    tokens = torch.randint(0, 8, (4, 2))
    for _ in range(3):
        for optimizer, module in zip(optimizers, (pipe, plain), strict=True):
            optimizer.zero_grad()
            module(tokens).square().sum().backward()
        torch.testing.assert_close(model.embed.weight.grad, plain.embed.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(model.embed.weight, plain.embed.weight)


class Counting(nn.Module):
    """Changes a buffer that two of its modules use."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.b(self.a(x) * self.count) + self.count


def test_a_buffer_that_changes_stays_in_one_layer():
    model = Counting().double()
    plain = copy.deepcopy(model)
    sequence = gpipe.to_sequential(model, batch())
    assert names_of(sequence) == ["a"]
    for _ in range(2):
        assert torch.equal(sequence(batch()), plain(batch()))
    assert model.count == 2


class Branches(nn.Module):
    """Cannot be exported: its control flow depends on data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x, factor):
        self.calls += 1
        y = self.linear(x)
        return {"y": y * factor if y.sum() > 0 else -y}


class WithBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.odd, self.b = nn.Linear(4, 4), Branches(), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.odd(self.a(x), factor=3)["y"]) + x


def test_opaque_modules_are_kept_whole():
    model = WithBranches().double()
    with pytest.raises(ValueError, match=r"'odd' \(Branches\) cannot be exported: .*; to keep .* pass opaque=\[Branches\]"):
        gpipe.to_sequential(model, batch())
    sequence = gpipe.to_sequential(model, batch(), opaque=[Branches])
    assert names_of(sequence) == ["a", "odd", "b"]
    assert sequence.state_dict().keys() == model.state_dict().keys()
    assert "forward" not in vars(model.odd)
    pipe = gpipe.GPipe(copy.deepcopy(sequence), [1, 1, 1], chunks=3)
    for module in (sequence, pipe):
        for samples in (batch(), batch(9)):
            parts = samples.chunk(3) if module is pipe else [samples]
            torch.testing.assert_close(module(samples), torch.cat([model(part) for part in parts]))
    pipe(batch()).sum().backward()
    assert pipe.get_parameter("odd.linear.weight").grad is not None
    with pytest.raises(ValueError, match="opaque has LSTM, but no submodule"):
        gpipe.to_sequential(model, batch(), opaque=[nn.LSTM])
    with pytest.raises(TypeError, match="opaque must be a list of subclasses"):
        gpipe.to_sequential(model, batch(), opaque=[int])


def exported(model, dynamic=True):
    return export(model, (batch(),), dynamic_shapes=({0: Dim.DYNAMIC},) if dynamic else None, strict=False)


def test_exported_programs(tmp_path):
    net = make_net()
    torch.export.save(exported(net), tmp_path / "net.pt2")
    for program in (exported(net), str(tmp_path / "net.pt2"), tmp_path / "net.pt2"):
        sequence = gpipe.to_sequential(program)
        assert sequence.state_dict().keys() == net.state_dict().keys()
        plain = copy.deepcopy(net)
        for mode in (True, False):
            outputs = []
            for module in (sequence.train(mode), plain.train(mode)):
                torch.manual_seed(2)
                outputs.append(module(batch()))
            assert torch.equal(*outputs)
        assert torch.equal(sequence.state_dict()["first.norm.num_batches_tracked"], torch.tensor(1))
        net.load_state_dict(make_net().state_dict())
    with pytest.raises(ValueError, match=r"inputs with a fixed dimension 0 \('x' of shape \(6, 4\)\)"):
        gpipe.to_sequential(exported(net, dynamic=False))
    with pytest.raises(ValueError, match="exported in evaluation mode"):
        gpipe.to_sequential(exported(make_net().eval()))
    with pytest.raises(ValueError, match="cannot tell what .* does in evaluation mode, because it calls aten.rand_like"):
        gpipe.to_sequential(exported(Returns(lambda x: x * torch.rand_like(x))))
    with pytest.raises(TypeError, match="without an example input"):
        gpipe.to_sequential(exported(net), batch())
    with pytest.raises(FileNotFoundError):
        gpipe.to_sequential(tmp_path / "missing.pt2")


class Constants(nn.Module):
    """Makes tensors in its forward, under no_grad and without autocast."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        with torch.no_grad():
            shift = torch.arange(4, device=x.device) + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
            length = (y * shift).sum(1, keepdim=True)
        with torch.autocast("cpu", enabled=False):
            y = y @ torch.eye(4, dtype=x.dtype)
        return self.b(y + length + torch.full((x.shape[0], 1), 0.5, dtype=x.dtype))


def test_constants_and_contexts():
    model = Constants().double()
    sequence = gpipe.to_sequential(model, batch())
    for module in (sequence, gpipe.GPipe(copy.deepcopy(sequence), [1, 1], chunks=2)):
        torch.testing.assert_close(module(batch()), model(batch()))
    gradients = [torch.autograd.grad(module(batch()).sum(), module.parameters()) for module in (sequence, model)]
    torch.testing.assert_close(*gradients)
    assert sequence.state_dict().keys() == model.state_dict().keys()


def test_copies_and_pickles():
    net = make_net()
    sequence = gpipe.to_sequential(net, batch()).eval()
    for other in (copy.deepcopy(sequence), pickle.loads(pickle.dumps(sequence)), sequence[:]):
        assert torch.equal(other(batch()), sequence(batch()))
        shared = {id(parameter) for parameter in other.parameters()} == {id(parameter) for parameter in net.parameters()}
        assert shared == (other[0] is sequence[0])
    with pytest.raises(TypeError, match="layer 'first.linear' .* stashes 'first.linear -> first', which no layer pops"):
        verify_skippables(sequence[:3])
    twice = nn.Sequential(sequence[:5], sequence[5:])
    assert torch.equal(twice(batch()), sequence(batch()))


def test_balances_and_pipelines_of_modules():
    net = make_net()
    assert sum(balance_by_time(2, net, batch(), timeout=0.1)) == 12
    suggestion = suggest(net, batch(), ["cpu", "cpu"], chunks=[2], seconds=1)
    assert sum(suggestion.best.balance) == 12
    assert "first.linear" in suggestion.profile_of(suggestion.best).table(suggestion.best.balance)
    pipe = gpipe.GPipe.from_module(net, (batch(),), stages=3, chunks=2, seconds=0.1, schedule="1f1b")
    assert len(pipe.balance) == 3 and pipe.schedule == "1f1b" and pipe.chunks == 2
    assert pipe(batch()).shape == (6, 3)


class Calls(nn.Module):
    """Calls a function with itself and the input."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.scales = nn.ParameterDict({"class": nn.Parameter(torch.randn(4)), "w-1": nn.Parameter(torch.randn(4))})
        self.register_buffer("count", torch.ones(4))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def counts_through_a_view(self, x):
    h = self.b(self.a(x) * self.count)
    self.count[0].add_(1)
    return h + 1


def reads_before_it_counts(self, x):
    count = self.count[0].item()
    self.count.add_(1)
    return self.b(self.a(x) * count) * count


def names_that_are_no_identifiers(self, x):
    return self.b(self.a(x) * self.shifts[0] + self.scales["class"]) * self.scales["w-1"] + self.shifts[1]


def calls_layers_under_vmap(self, x):
    return self.b(torch.vmap(lambda row: self.b(self.a(row)) + self.count)(x))


@pytest.mark.parametrize(
    "function",
    [counts_through_a_view, reads_before_it_counts, names_that_are_no_identifiers, calls_layers_under_vmap],
)
def test_functions_that_are_hard_to_divide(function):
    model = Calls(function).double()
    plain = copy.deepcopy(model)
    sequence = gpipe.to_sequential(model, batch())
    pipe = gpipe.GPipe(copy.deepcopy(sequence), [1] * len(sequence))
    for _ in range(2):
        expected = plain(batch())
        for module in (sequence, pipe):
            torch.testing.assert_close(module(batch()), expected)
            torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()))


class ManyNames(nn.Module):
    def forward(self, _input, torch, inf, _device, getattr):
        return (_input * torch + inf).tanh() / (_device + getattr)


def test_names_of_inputs_are_free():
    inputs = tuple(torch.rand(6, 4) + 1 for _ in range(5))
    sequence = gpipe.to_sequential(ManyNames(), *inputs)
    assert torch.equal(sequence(inputs), ManyNames()(*inputs))


def test_one_tensor_in_two_places_of_the_example_is_two_inputs():
    x, y = batch(), batch() + 1
    sequence = gpipe.to_sequential(Several().double(), x, x, mask=x)
    model = Several().double()
    model.load_state_dict(sequence.state_dict())
    torch.testing.assert_close(sequence(((x, y), {"mask": y + 1})).sum, model(x, y, mask=y + 1).sum)
    by_name = gpipe.to_sequential(model, x=x, factor=x, mask=x)
    assert torch.equal(by_name({"mask": y, "factor": x, "x": x}).sum, model(x, x, mask=y).sum)


def test_constants_among_the_inputs_stay():
    class Scales(nn.Module):
        def forward(self, x, factor):
            return x * factor

    sequence = gpipe.to_sequential(Scales(), batch(), 2)
    assert torch.equal(sequence((batch(), None)), batch() * 2)
    with pytest.raises(ValueError, match="input 1 was a constant when the model was converted; give None, not 3"):
        sequence((batch(), 3))


def test_norms_of_exported_programs():
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.InstanceNorm1d(4, track_running_stats=True)
            self.b = nn.BatchNorm1d(4, track_running_stats=False)

        def forward(self, x):
            return self.b(self.a(x))

    model, x = Norms(), torch.rand(6, 4, 5)
    program = export(model, (x,), dynamic_shapes=({0: Dim.DYNAMIC},), strict=False)
    sequence = gpipe.to_sequential(program)
    for mode in (True, False):
        plain = copy.deepcopy(model).train(mode)
        torch.testing.assert_close(sequence.train(mode)(x), plain(x))
        model.load_state_dict(plain.state_dict())
