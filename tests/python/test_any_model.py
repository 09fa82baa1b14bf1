"""A model of another library, converted and run as a pipeline, equals the original, called micro-batch by micro-batch.

``tests/long zoo`` tries all models of bench/zoo.py.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import gpipe

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import zoo  # noqa: E402


def test_a_model_equals_its_pipeline(one_thread):
    for library in ("torchvision", "transformers"):
        pytest.importorskip(library)
    torch.manual_seed(0)
    model, args, kwargs = zoo.models()["transformers gpt2"]()
    model = model.double().train()
    sequence = gpipe.to_sequential(model, *args, **kwargs)
    options = {"chunks": 3, "checkpoint": "except_last", "schedule": "interleaved_1f1b", "placement": [0, 1, 0, 1]}
    options["balance"] = [1, 1, 1, len(sequence) - 3]
    assert max(zoo.compare(model, args, kwargs, sequence, **options)) < 1e-9
    model.eval()
    sequence.eval()
    with torch.no_grad():
        outputs = [model(*args, **kwargs), sequence(zoo.input_of(args, kwargs))]
    assert type(outputs[0]) is type(outputs[1])
    torch.testing.assert_close(*map(tree_leaves, outputs), rtol=1e-9, atol=1e-9)
