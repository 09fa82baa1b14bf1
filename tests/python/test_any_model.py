"""Models of other libraries, converted and run as pipelines, equal the original, called micro-batch by micro-batch.

``./test`` tries those in ``SHORT``, ``tests/long python`` also those in ``LONG``. Both are names of zoo.py.
"""

import random

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import gpipe
import zoo
import zoo_sweep
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
    sequence = gpipe.to_sequential(model, *args, **kwargs)
    # Each schedule has its turn.
    schedule = gpipe.SCHEDULES[[*SHORT, *LONG].index(name) % len(gpipe.SCHEDULES)]
    loops = schedule.startswith(("interleaved", "looped"))
    stages = rng.choice([2, 4, 6]) * (1 + loops)
    differences = zoo_sweep.compare(
        model,
        args,
        kwargs,
        sequence,
        balance=random_balance(rng, len(sequence), stages),
        chunks=rng.choice([1, 3, 4]),
        checkpoint=rng.choice(["never", "except_last", "always"]),
        schedule=schedule,
        placement=[*range(stages // 2)] * 2 if loops else "looped",
    )
    assert all(found < 1e-9 for difference in differences for found in difference.values())
    model.eval()
    sequence.eval()
    with torch.no_grad():
        outputs = [model(*args, **kwargs), sequence(zoo_sweep.input_of(args, kwargs))]
    assert type(outputs[0]) is type(outputs[1])
    torch.testing.assert_close(*map(tree_leaves, outputs), rtol=1e-9, atol=1e-9)
