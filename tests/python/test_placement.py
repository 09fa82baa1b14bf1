"""The devices of a pipeline's parameters and buffers."""

import pytest
import torch

import gpipe
from layers import make_linears


def test_moving_to_another_device_is_refused():
    pipe = gpipe.GPipe(make_linears(), [2, 2])
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


def test_moving_to_the_present_device_changes_nothing():
    pipe = gpipe.GPipe(make_linears(), [2, 2])
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


def test_the_dtype_can_be_changed():
    pipe = gpipe.GPipe(make_linears(), [2, 2])
    assert pipe.to(torch.float64) is pipe
    assert next(pipe.parameters()).dtype == torch.float64
    assert pipe(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64
    pipe.half()
    assert next(pipe.parameters()).dtype == torch.float16
    pipe.to(dtype=torch.float32)
    assert pipe(torch.zeros(2, 3)).dtype == torch.float32
