"""Models of other libraries, converted and run as pipelines, equal the original, called micro-batch by micro-batch.

``./test`` tries those in ``SHORT``, ``tests/long python`` also those in ``LONG``. Both are names of zoo.py.
"""

import copy
import random

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import gpipe
import zoo
from conftest import long
from helpers import random_balance

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ["MONAI DenseNet", "transformers gpt2", "transformers t5"]
KINDS = {
    "torchvision": """squeezenet1_1 mobilenet_v3_small shufflenet_v2_x0_5 regnet_y_400mf resnet50 googlenet densenet121
        inception_v3 efficientnet_b0 convnext_tiny swin_t""",
    "timm": "hrnet_w18_small coatnet_pico_rw_224 vit_tiny_patch16_224 xcit_nano_12_p16_224",
    "segmentation_models_pytorch": "Unet UnetPlusPlus",
    "MONAI": "UNet UNETR SwinUNETR SegResNet",
    "diffusers": "UNet2DModel UNet2DConditionModel SD3Transformer2DModel",
    "transformers": "bert roberta llama xmod vit wav2vec2",
}
LONG = [f"{library} {name}" for library, names in KINDS.items() for name in names.split()]


def parts_of(tree, chunks):
    """Returns the micro-batches of an object."""
    size = -(-samples_of(tree) // chunks)
    starts = range(0, samples_of(tree), size)
    return [tree_map(lambda leaf: leaf[i : i + size] if torch.is_tensor(leaf) else leaf, tree) for i in starts]


def samples_of(tree):
    return len(next(leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)))


def weighted_sum(output, _=None):
    """A loss that treats samples alike and elements differently."""
    total = 0.0
    for leaf in tree_leaves(output):
        if torch.is_tensor(leaf) and leaf.is_floating_point():
            rows = leaf.double().flatten(1)
            total = total + (rows * torch.linspace(-1, 1, rows.shape[1], dtype=torch.float64)).sin().sum()
    return total


def assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def assert_same_state(ours, theirs):
    """Compares gradients and buffers by name. The noise of a large sum is relative to the largest gradient."""
    mine, gradients = ({name: each.grad for name, each in module.named_parameters()} for module in (ours, theirs))
    largest = max(gradient.abs().max() for gradient in gradients.values() if gradient is not None)
    torch.testing.assert_close(mine, gradients, rtol=0, atol=1e-9 * float(largest))
    assert_equal(dict(ours.state_dict()), dict(theirs.state_dict()))


@pytest.mark.parametrize("name", [*SHORT, *map(long, LONG)])
def test_a_model_equals_its_pipeline(name):
    for library in ("torchvision", name.split()[0].lower()):
        pytest.importorskip(library)
    torch.manual_seed(0)
    rng = random.Random(name)
    model, args, kwargs = zoo.models()[name]()
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
        assert_equal(*map(tree_leaves, outputs))
        assert_same_state(sequence, plain)
        for optimizer in optimizers:
            optimizer.step()
    sequence.eval()
    plain.eval()
    with torch.no_grad():
        assert_equal(tree_leaves(sequence(input)), tree_leaves(plain(*args, **kwargs)))

    sequence.train()
    # A pipeline without dropout equals the original. Each schedule has its turn.
    norms = {path for path, module in model.named_modules() if "BatchNorm" in type(module).__name__}
    plain = copy.deepcopy(model)
    for tree in (plain, *(layer.model for layer in sequence)):
        for path, module in tree.named_modules():
            module.training = path in norms
    chunks = rng.choice([1, 3, 4])
    schedule = gpipe.SCHEDULES[[*SHORT, *LONG].index(name) % len(gpipe.SCHEDULES)]
    per_worker = 2 if schedule.startswith(("interleaved", "looped")) else 1
    pipe = gpipe.GPipe(
        sequence,
        random_balance(rng, len(sequence), rng.choice([2, 4, 6]) * per_worker),
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
    target = torch.zeros(samples_of(input))
    loss, output = pipe.step(input, target, weighted_sum, reduction="sum", return_output=True)
    leaves = [each for each in zip(*map(tree_leaves, outputs), strict=True) if torch.is_tensor(each[0])]
    assert_equal([leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)], list(map(torch.cat, leaves)))
    assert_equal(loss, sum(losses))
    assert_same_state(pipe, plain)
    plain.load_state_dict(pipe.state_dict())
