"""The devices and the dtype of a pipeline's parameters and buffers."""

import pytest
import torch

import gpipe
from helpers import make_linears

CPU, META = torch.device("cpu", 0), torch.device("meta")


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.cuda(),
        lambda pipe: pipe.cuda(0),
        lambda pipe: pipe.xpu(),
        lambda pipe: pipe.to("meta"),
        lambda pipe: pipe.to(0),
        lambda pipe: pipe.to(META),
        lambda pipe: pipe.to(torch.zeros(1, device=META)),
        lambda pipe: pipe.to(device="meta"),
        lambda pipe: pipe.to("meta", torch.float64),
        lambda pipe: pipe.to(tensor=torch.zeros(1, device=META)),
        lambda pipe: pipe.to_empty(device="cpu"),
        lambda pipe: [pipe[0].to("meta"), pipe.cpu()],
    ],
)
def test_moving_to_another_device_is_refused(move):
    pipe = gpipe.GPipe(make_linears(), [2, 2])
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        move(pipe)
    assert pipe[3].weight.dtype == torch.float32


def test_dtypes_change_and_the_present_device_stays():
    pipe = gpipe.GPipe(make_linears(), [2, 2])
    weight = pipe[0].weight
    for arguments in (["cpu"], [CPU], [torch.zeros(1)]):
        assert pipe.to(*arguments) is pipe is pipe.cpu() is pipe.to(device="cpu", non_blocking=True)
        assert pipe[0].weight is weight and weight.dtype == torch.float32
    for move in (lambda: pipe.to("cpu", torch.float64), lambda: pipe.half().to(torch.float64)):
        assert move() is pipe
        assert pipe(torch.zeros(2, 3, dtype=torch.float64)).dtype == pipe[0].weight.dtype == torch.float64
    pipe.to(dtype=torch.float32)
    assert pipe(torch.zeros(2, 3)).dtype == torch.float32
