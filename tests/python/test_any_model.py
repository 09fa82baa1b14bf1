"""Models of other libraries, converted and run as pipelines, equal the original, called micro-batch by micro-batch.

``tests/long zoo`` tries all models of bench/zoo.py.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import gpipe

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import zoo  # noqa: E402

CASES = {
    "MONAI DenseNet": {"chunks": 2, "checkpoint": "always", "schedule": "1f1b"},
    "transformers gpt2": {"chunks": 3, "checkpoint": "except_last", "schedule": "interleaved_1f1b", "placement": [0, 1, 0, 1]},
    "transformers t5": {"chunks": 1, "checkpoint": "never", "schedule": "zb_h1"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_equals_its_pipeline(name, one_thread):
    for library in ("torchvision", name.split()[0].lower()):
        pytest.importorskip(library)
    torch.manual_seed(0)
    model, args, kwargs = zoo.models()[name]()
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # moves activations away from the kink of ReLU at 0
                parameter.add_(torch.rand_like(parameter), alpha=0.2)
    args, kwargs = tree_map(lambda x: x.double() if torch.is_tensor(x) and x.is_floating_point() else x, (args, kwargs))
    sequence = gpipe.to_sequential(model, *args, **kwargs)
    stages = len(CASES[name].get("placement", "ab"))
    balance = [len(sequence) // stages] * (stages - 1)
    options = {**CASES[name], "balance": [*balance, len(sequence) - sum(balance)]}
    assert max(zoo.compare(model, args, kwargs, sequence, **options)) < 1e-9
    model.eval()
    sequence.eval()
    with torch.no_grad():
        outputs = [model(*args, **kwargs), sequence(zoo.input_of(args, kwargs))]
    assert type(outputs[0]) is type(outputs[1])
    torch.testing.assert_close(*map(tree_leaves, outputs), rtol=1e-9, atol=1e-9)
