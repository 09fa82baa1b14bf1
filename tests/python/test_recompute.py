"""A recompute repeats its forward: the same buffers, the same random numbers."""

import contextlib
import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gpipe

MODES = ["never", "except_last", "always"]


def step(make, mode, *, stages=2, chunks=3, steps=2):
    """Returns gradients and buffers after some steps."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = make()
    size = len(model) // stages
    balance = [size] * (stages - 1) + [len(model) - size * (stages - 1)]
    pipe = gpipe.GPipe(model, balance, chunks=chunks, checkpoint=mode)
    torch.manual_seed(1)
    for _ in range(steps):
        pipe(torch.randn(6, 8)).square().sum().backward()
    return [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]


def same(results, expected):
    return len(results) == len(expected) and all(map(torch.equal, results, expected))


class Checkpoints(nn.Module):
    """A block with dropout before, in and after a part that it may checkpoint itself."""

    def __init__(self, reentrant, **options):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.reentrant = reentrant
        self.options = options

    def block(self, x):
        return nn.functional.dropout(self.linear(nn.functional.dropout(x, 0.3)).tanh(), 0.3)

    def forward(self, x):
        x = nn.functional.dropout(x, 0.3)
        if self.reentrant is None:
            x = self.block(x)
        else:
            x = torch_checkpoint(self.block, x, use_reentrant=self.reentrant, **self.options)
        return nn.functional.dropout(x, 0.3)


def checkpointing_model(reentrant):
    return lambda: nn.Sequential(nn.Linear(8, 8), Checkpoints(reentrant), Checkpoints(reentrant), nn.Linear(8, 8))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpoint_repeat_their_draws(reentrant, mode):
    # A reentrant checkpoint adds to .grad per micro-batch, so the sums are bit-equal in the first step only.
    steps = 1 if reentrant else 2
    assert same(
        step(checkpointing_model(reentrant), mode, steps=steps), step(checkpointing_model(None), mode, steps=steps)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpoint_do_not_change_the_default_generator(reentrant):
    def state(make):
        step(make, "always")
        return torch.get_rng_state()

    assert torch.equal(state(checkpointing_model(reentrant)), state(checkpointing_model(None)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpoint_repeat_their_draws_in_the_reference(reentrant):
    def gradients(reentrant):
        torch.manual_seed(0)
        model = checkpointing_model(reentrant)()
        gpipe.reference(model, torch.randn(6, 8), chunks=3).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert same(gradients(reentrant), gradients(None))


class Seeding(nn.Module):
    def forward(self, x):
        torch.manual_seed(7)
        return x * torch.rand(8)


def test_a_layer_that_seeds_affects_only_its_own_draws():
    pipe = gpipe.GPipe(nn.Sequential(Seeding(), nn.Dropout(0.5)), [1, 1], chunks=2)
    x = torch.ones(4, 8)
    torch.manual_seed(0)
    first, second = pipe(x), pipe(x)
    assert not torch.equal(first, second)  # the seed does not affect the dropout
    torch.manual_seed(7)
    drawn = torch.rand(8)
    assert all(torch.equal(row[row != 0], (drawn * 2)[row != 0]) for row in first)


class Counts(nn.Module):
    """Replaces its buffers: a count, a moving average, and a table that the first forward makes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("table", None)

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(8.0)
        self.count = self.count + 1
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.linear(x) * self.average + self.table * self.count


def test_recomputes_use_the_buffers_before_their_forward_replaced_them():
    def make():
        return nn.Sequential(nn.Linear(8, 8), Counts(), Counts(), nn.Linear(8, 8))

    expected = step(make, "never")
    for mode in MODES:
        for chunks in (1, 3):
            assert same(step(make, mode, chunks=chunks), step(make, "never", chunks=chunks))
    assert expected[-1].shape == (8,)


TABLES = {
    "expanded": lambda: torch.ones(1, 8).expand(20000, 8),
    "sparse": lambda: torch.sparse_coo_tensor(torch.arange(30000)[None] % 8, torch.ones(30000), (8,)),
    "sparse rows": lambda: torch.eye(8).repeat(2000, 1).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(8), torch.ones(30000)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(8), torch.ones(30000)], layout=torch.jagged),
}


class Table(nn.Module):
    """Multiplies by a row of a buffer, which each forward may scale."""

    def __init__(self, table, factor):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = factor
        self.register_buffer("table", table)

    def row(self):
        if self.table.is_nested:
            return self.table.unbind()[0].clone()
        dense = self.table.to_dense() if self.table.layout != torch.strided else self.table
        return dense.reshape(-1)[:8].clone()

    def forward(self, x):
        if self.factor != 1:
            self.table.mul_(self.factor)
        return self.linear(x) * self.row()


@pytest.mark.filterwarnings("ignore:.*(Nested|CSR).*")
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("kind", TABLES)
def test_recomputes_read_buffers_of_every_layout(kind, factor):
    if kind == "expanded" and factor != 1:
        pytest.skip("PyTorch writes to no expanded tensor")
    alone, x = Table(TABLES[kind](), factor), torch.rand(6, 8)
    for _ in range(2):
        for part in x.chunk(3):
            alone(part).sum().backward()
    for mode in MODES:
        layer = Table(TABLES[kind](), factor)
        pipe = gpipe.GPipe(nn.Sequential(layer), [1], chunks=3, checkpoint=mode)
        for _ in range(2):
            pipe(x).sum().backward()
        torch.testing.assert_close(layer.linear.weight.grad, alone.linear.weight.grad)
        assert torch.equal(layer.row(), alone.row())


def test_recomputes_run_in_the_modes_of_their_forward():
    def step(mode):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(8, 8), inner, nn.Dropout(0.5)), [1, 2], chunks=3, checkpoint=mode)
        inner[1].eval()
        loss = pipe(torch.rand(6, 8)).square().sum()
        pipe.eval()
        inner[1].train()
        loss.backward()
        assert [each.training for each in (inner, *inner, pipe[2])] == [False, False, True, False, False]
        return [parameter.grad for parameter in pipe.parameters()] + [buffer.clone() for buffer in pipe.buffers()]

    for mode in MODES:
        assert same(step(mode), step("never"))


class Grows(nn.Module):
    """Makes a submodule in its first forward."""

    def __init__(self):
        super().__init__()
        self.body = None

    def forward(self, x):
        if self.body is None:
            self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        return nn.functional.dropout(self.body(x), 0.5)


@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_h1"])
def test_submodules_may_be_made_in_the_first_forward(schedule):
    def step(mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Grows(), Grows())
        pipe = gpipe.GPipe(model, [2, 1], chunks=3, checkpoint=mode, schedule=schedule or "gpipe")
        x, optimizer = torch.rand(12, 8), None
        for _ in range(3):
            if schedule is None:
                pipe(x).square().mean().backward()
            else:
                pipe.step(x, torch.zeros(12, 8), nn.functional.mse_loss)
            optimizer = optimizer or torch.optim.SGD(pipe.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert len(list(pipe.parameters())) == 10
        return list(pipe.state_dict().values())

    for mode in MODES:
        torch.testing.assert_close(step(mode), step("never"))


def test_a_submodule_made_in_a_later_forward_fails_that_call():
    class GrowsLater(Grows):
        grows = False

        def forward(self, x):
            return super().forward(x) if self.grows else x * 1

    layer, x = GrowsLater(), torch.rand(6, 8)
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(8, 8), layer), [1, 1], chunks=3, checkpoint="always")
    pipe(x).sum().backward()
    layer.grows = True
    loss = pipe(x).sum()
    with pytest.raises(RuntimeError, match="stage 1 made a parameter in a forward that is recomputed; repeat the call"):
        loss.backward()
    pipe(x).sum().backward()
    assert layer.body[0].weight.grad is not None


class Fails(nn.Module):
    def forward(self, x):
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_forward_restores_buffers(mode):
    counts = Counts()
    pipe = gpipe.GPipe(nn.Sequential(counts, Fails()), [1, 1], chunks=2, checkpoint=mode)
    with pytest.raises(ArithmeticError):
        pipe(torch.ones(4, 8))
    assert counts.count == 0
    assert counts.table is None
    assert torch.equal(counts.average, torch.ones(8))


class Codebook(nn.Module):
    """Changes a buffer that it reads, without changing its version counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(3000, 8))

    def forward(self, x):
        self.codes.data[:4].lerp_(x.detach()[:1], 0.5)
        return x * self.codes[:4].mean(0)


def test_recomputes_use_the_buffers_before_their_forward_changed_them():
    def make():
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        old_spectral = nn.utils.spectral_norm(nn.Linear(8, 8))
        return nn.Sequential(spectral, Codebook(), old_spectral, Codebook())

    for chunks in (1, 3):
        expected = step(make, "never", chunks=chunks)
        for mode in MODES[1:]:
            assert same(step(make, mode, chunks=chunks), expected)


class Draws(nn.Module):
    """Scales its output with draws of Python's and NumPy's generators."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drawn = []

    def forward(self, x):
        numbers = random.random(), numpy.random.rand()
        self.drawn.append((gpipe.is_recomputing(), numbers))
        return self.linear(x) * numbers[0] + numbers[1]


def test_draws_of_python_and_numpy_are_repeated():
    model = nn.Sequential(Draws(), Draws(), nn.Linear(8, 8), Draws())
    pipe = gpipe.GPipe(model, [1, 1, 1, 1], chunks=4, checkpoint="always")
    for _ in range(3):
        pipe(torch.randn(8, 8)).sum().backward()
    for layer in (model[0], model[1], model[3]):
        forwards = [numbers for recomputing, numbers in layer.drawn if not recomputing]
        recomputes = [numbers for recomputing, numbers in layer.drawn if recomputing]
        assert sorted(forwards) == sorted(recomputes)
        assert len(set(forwards)) == 12


def test_draws_in_nested_pipelines_do_not_deadlock():
    inner = gpipe.GPipe(nn.Sequential(Draws(), Draws()), [1, 1], chunks=2, checkpoint="always")
    outer = gpipe.GPipe(nn.Sequential(Draws(), inner, Draws()), [1, 1, 1], chunks=2, checkpoint="always")
    loss = outer(torch.randn(8, 8)).sum()
    with contextlib.suppress(RuntimeError):  # the inner stages may have drawn in another order
        loss.backward()


def test_a_recompute_that_draws_other_numbers_is_an_error():
    class Disturbed(nn.Module):
        def forward(self, x):
            if not gpipe.is_recomputing():
                random.random()
            return x * random.random()

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(8, 8), Disturbed()), [2], checkpoint="always")
    with pytest.raises(RuntimeError, match="drew other numbers"):
        pipe(torch.randn(8, 8)).sum().backward()


def test_hooks_of_parameters_without_a_gradient_are_not_called():
    class HalfUsed(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    for mode in MODES:
        layer = HalfUsed()
        seen = []
        for name, parameter in layer.named_parameters():
            parameter.register_hook(lambda grad, name=name: seen.append((name, grad is None)))
        handle = layer.unused.weight.register_hook(lambda grad: seen.append("removed"))
        pipe = gpipe.GPipe(nn.Sequential(layer, nn.Linear(8, 8)), [1, 1], chunks=2, checkpoint=mode)
        pipe(torch.randn(4, 8)).sum().backward()
        handle.remove()
        assert sorted(seen) == [("used.bias", False), ("used.weight", False)]
