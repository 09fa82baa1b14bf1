"""Pipelines on devices that check the order of streams (tests/accelerator). test_process.py runs these tests in a
process of their own, because the devices change PyTorch's defaults.
"""

import copy
import ctypes
import functools
import os
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe
import gpipe.balance
from helpers import Join, Split, YieldAdd, YieldStash

LAYOUTS = {
    "three_devices": ["checked:2", "checked:0", "checked:1"],
    "cpu_in_the_middle": ["checked:1", "cpu", "checked:0"],
    "cpu_last": ["checked:3", "checked:3", "cpu"],
}


def load_devices():
    library = ctypes.CDLL(os.environ["CHECKED_DEVICE"])
    library.take_violations.restype = ctypes.c_char_p
    module = types.ModuleType("torch.checked")
    module.is_available = lambda: True
    module.device_count = lambda: 8
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None  # the tests compare nothing that the devices draw outside of scopes
    torch._register_device_module("checked", module)
    return library


DEVICES = load_devices() if __name__ != "__main__" else None


@pytest.fixture(autouse=True)
def work_is_ordered():
    DEVICES.take_violations()
    yield
    assert DEVICES.take_violations().decode() == ""


@pytest.fixture(params=LAYOUTS)
def devices(request):
    return LAYOUTS[request.param]


def make_model():
    torch.manual_seed(0)
    first = [nn.Linear(6, 6), YieldStash(), nn.Linear(6, 6), nn.BatchNorm1d(6), Split()]
    rest = [Join(), YieldAdd(), nn.ReLU(inplace=True), nn.Linear(6, 6)]
    return nn.Sequential(*first, *rest).double()


def batch(devices, width=6):
    torch.manual_seed(1)
    return torch.rand(8, width).double().to(devices[0])


def on_cpu(tensors):
    return [tensor.detach().cpu().clone() for tensor in tensors]


def gradients(pipe):
    return on_cpu(parameter.grad for parameter in pipe.parameters())


def host_waits(call):
    for _ in range(2):
        call()
    DEVICES.take_host_waits()
    call()
    return DEVICES.take_host_waits()


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_the_host_waits_once_per_device_for_a_scaler(checkpoint):
    options = {"devices": ["checked:0", "checked:1", "checked:2"], "schedule": "zb_h1" if checkpoint == "never" else "1f1b"}
    pipe = gpipe.GPipe(make_model().float(), [3, 2, 4], chunks=4, checkpoint=checkpoint, **options)
    x, target = torch.rand(8, 6).to("checked:0"), torch.rand(8, 6).to("checked:2")
    optimizer, scaler = torch.optim.SGD(pipe.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def train():
        optimizer.zero_grad()
        pipe.step(x, target, F.mse_loss, scale=scaler)
        scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    counted = gpipe.Loss(F.mse_loss, count=lambda target: (target < 2).sum())
    assert host_waits(lambda: pipe.step(x, target, counted)) == 0
    assert host_waits(train) == 3 + 1, "a device may have overflowed; the step needs the scale"


def test_a_module_on_two_devices_is_refused():
    linear = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(linear), nn.Sequential(linear))
    with pytest.raises(ValueError, match="'weight' of a Linear belongs to stages on different devices"):
        gpipe.GPipe(model, [1, 1], devices=["checked:0", "checked:1"])
    gpipe.GPipe(model, [1, 1], devices=["checked:0", "checked:0"])(torch.rand(4, 4).to("checked:0"))
    scripted = torch.jit.script(nn.Linear(4, 4))
    tied = nn.Linear(4, 4)
    tied.weight = scripted.weight
    with pytest.raises(ValueError, match="the module is compiled by TorchScript"):
        gpipe.GPipe(nn.Sequential(tied, scripted), [1, 1], devices=["checked:0", "checked:1"])


class Converted(nn.Module):
    """Makes tensors in its forward, uses values and tensors in several layers, and computes more in training mode."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.extra, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.third.weight = self.first.weight
        self.register_buffer("table", torch.linspace(-1, 1, 4), persistent=False)

    def forward(self, x):
        positions = torch.arange(4, device=x.device, dtype=x.dtype)
        y = self.norm(self.first(x * self.table)) + positions
        z = self.second(y) * torch.tensor([1.0, 0.5, 2.0, 0.25], dtype=x.dtype, device=x.device)
        z = z + torch.ones(x.shape[0], 1, dtype=x.dtype, device=x.device) * self.table
        z = self.third(torch.where(y > 0, z, y)) + torch.full_like(x, 0.5)
        if self.training:
            z = self.extra(z) + x
        return {"out": self.last(z + positions), "aux": y if self.training else None}


@functools.cache
def converted():
    torch.manual_seed(0)
    model = Converted().double()
    return model, gpipe.to_sequential(model, batch(["cpu"], 4))


@pytest.mark.parametrize(("cut", "checkpoint"), [([1, 2, 3], "never"), ([3, 1, 2], "always")])
def test_a_converted_model_equals_the_original_on_the_cpu(devices, cut, checkpoint):
    original, sequence = copy.deepcopy(converted())
    pipe = gpipe.GPipe(copy.deepcopy(sequence), cut, devices=devices, chunks=2, checkpoint=checkpoint)
    for stage, device in zip(pipe.partitions, devices, strict=True):
        assert {buffer.device for buffer in stage.buffers()} <= {torch.device(device)}
    x = batch(devices, 4)
    for training in (True, False):
        pipe.train(training)
        original.train(training)
        output, parts = pipe(x), [original(part) for part in x.cpu().chunk(2)]
        assert (output["aux"] is not None) == training
        for key in ("out", "aux") if training else ("out",):
            torch.testing.assert_close(output[key].cpu(), torch.cat([part[key] for part in parts]))
    pipe.train()
    original.train()
    pipe.step(x, x, gpipe.Loss(lambda output, _: output["out"].sum() + output["aux"].sin().sum(), reduction="sum"))
    for part in x.cpu().chunk(2):
        output = original(part)
        (output["out"].sum() + output["aux"].sin().sum()).backward()
    names = [name for name, _ in original.named_parameters()]
    torch.testing.assert_close(on_cpu(pipe.get_parameter(each).grad for each in names), gradients(original))
    state = pipe.state_dict()
    torch.testing.assert_close(on_cpu(state[name] for name in original.state_dict()), [*original.state_dict().values()])
    costs = gpipe.balance.profile(make_model(), batch(["checked:1"]), device="checked:1", seconds=0)
    assert sum(costs.balance_by_time(2)) == 9


if __name__ == "__main__":
    os.environ["CHECKED_DEVICE"] = sys.argv[1]
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
