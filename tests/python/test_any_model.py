"""Models of other libraries, converted and run as pipelines, equal the original, called micro-batch by micro-batch."""

import copy
import random

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import gpipe
from conftest import long
from model_zoo import MODELS, SHORT

pytestmark = pytest.mark.usefixtures("one_thread")

def parts_of(tree, chunks):
    """Returns the micro-batches of an object."""
    samples = next(leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)).shape[0]
    size = -(-samples // chunks)
    return [
        tree_map(lambda leaf: leaf[i : i + size] if torch.is_tensor(leaf) else leaf, tree)
        for i in range(0, samples, size)
    ]


def weighted_sum(output, _=None):
    """A loss that treats samples alike and elements differently."""
    total = 0.0
    for leaf in tree_leaves(output):
        if torch.is_tensor(leaf) and leaf.is_floating_point():
            rows = leaf.double().flatten(1)
            total = total + (rows * torch.linspace(-1, 1, rows.shape[1], dtype=torch.float64)).sin().sum()
    return total


def assert_equal(ours, theirs, what=""):
    ours, theirs = tree_leaves(ours), tree_leaves(theirs)
    assert [torch.is_tensor(leaf) for leaf in ours] == [torch.is_tensor(leaf) for leaf in theirs], what
    for a, b in zip(ours, theirs, strict=True):
        if torch.is_tensor(a):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def assert_same_state(ours, theirs):
    """Compares gradients and buffers by name. The noise of a large sum is relative to the largest gradient."""
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert mine.keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values() if gradient is not None)
    for name, gradient in gradients.items():
        assert (gradient is None) == (mine[name] is None), name
        if gradient is not None:
            assert (gradient - mine[name]).abs().max() <= 1e-9 * largest, name
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    for name, value in ours.state_dict().items():
        assert_equal(value, state[name], name)


def without_dropout(modules, norms):
    """Leaves only batch norms in training mode. ``norms`` has their paths."""
    for path, module in modules:
        module.training = path in norms


def random_cut(rng, layers, stages):
    cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    return [last - first for first, last in zip(cuts, cuts[1:], strict=False)]


@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in MODELS])
def test_a_model_equals_its_pipeline(name):
    torch.manual_seed(0)
    rng = random.Random(name)
    model, args, kwargs = MODELS[name]()
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # moves activations away from the kink of ReLU at 0
                parameter.add_(torch.rand_like(parameter), alpha=0.2)
    args, kwargs = tree_map(lambda x: x.double() if torch.is_tensor(x) and x.is_floating_point() else x, (args, kwargs))
    input = kwargs or (args[0] if len(args) == 1 else args)
    sequence = gpipe.to_sequential(model, *args, **kwargs)
    assert {id(tensor) for tensor in sequence.parameters()} == {id(tensor) for tensor in model.parameters()}
    plain = copy.deepcopy(model)

    # The unpartitioned sequence, with dropout: two steps.
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in (sequence, plain)]
    for _ in range(2):
        outputs = []
        for optimizer, call in zip(optimizers, (lambda: sequence(input), lambda: plain(*args, **kwargs)), strict=True):
            torch.manual_seed(1)
            optimizer.zero_grad()
            outputs.append(call())
            weighted_sum(outputs[-1]).backward()
        assert type(outputs[0]) is type(outputs[1])
        assert_equal(*outputs)
        assert_same_state(sequence, plain)
        for optimizer in optimizers:
            optimizer.step()
    sequence.eval()
    plain.eval()
    with torch.no_grad():
        assert_equal(sequence(input), plain(*args, **kwargs))

    sequence.train()
    # A pipeline without dropout equals the original. Each schedule has its turn.
    norms = {path for path, module in model.named_modules() if "BatchNorm" in type(module).__name__}
    for layer in sequence:
        without_dropout(layer.model.named_modules(), norms)
    plain = copy.deepcopy(model)
    without_dropout(plain.named_modules(), norms)
    chunks = rng.choice([1, 3, 4])
    schedule = gpipe.SCHEDULES[list(MODELS).index(name) % len(gpipe.SCHEDULES)]
    per_worker = 2 if schedule.startswith(("interleaved", "looped")) else 1
    pipe = gpipe.GPipe(
        sequence,
        random_cut(rng, len(sequence), rng.choice([2, 4, 6]) * per_worker),
        chunks=chunks,
        checkpoint=rng.choice(["never", "except_last", "always"]),
        schedule=schedule,
        stages_per_worker=per_worker,
    )
    for module in (pipe, plain):
        module.zero_grad()
    outputs = [plain(*part[0], **part[1]) for part in parts_of((args, kwargs), chunks)]
    losses = [weighted_sum(output) for output in outputs]
    sum(losses).backward()
    target = torch.zeros(tree_leaves(input)[0].shape[0])
    loss, output = pipe.step(input, target, weighted_sum, reduction="sum", return_output=True)
    leaves = [each for each in zip(*map(tree_leaves, outputs), strict=True) if torch.is_tensor(each[0])]
    joined = [torch.cat(each) for each in leaves]
    assert_equal([leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)], joined)
    assert_equal(loss, sum(losses))
    assert_same_state(pipe, plain)
    plain.load_state_dict(pipe.state_dict())
