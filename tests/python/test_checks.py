"""Arguments, models and inputs that a pipeline refuses."""

import pytest
import torch
from torch import nn

import gpipe
from helpers import make_linears


def test_interleaved_stages_share_the_devices_that_are_given():
    for schedule in ("interleaved_1f1b", "interleaved_zb"):
        pipe = gpipe.GPipe(make_linears(), [1] * 4, devices=["cpu"] * 2, schedule=schedule)
        assert pipe.placement == [0, 1, 0, 1] and len(pipe.devices) == 2


class DoublesItsResult(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


def set_forward(layers):
    layers.forward = DoublesItsResult.forward


@pytest.mark.parametrize("change", [lambda layers: layers.compile(), set_forward])
def test_a_model_with_its_own_forward_is_refused(change):
    layers = make_linears()
    change(layers)
    for changed in (layers, DoublesItsResult(*layers)):
        with pytest.raises(TypeError, match=f"the model \\({type(changed).__name__}\\) has a forward of its own"):
            gpipe.GPipe(changed, [2, 2])
    gpipe.GPipe(nn.Sequential(*layers), [2, 2])


@pytest.mark.parametrize(
    "register, lost",
    [
        (nn.Module.register_forward_pre_hook, "a forward pre hook"),
        (nn.Module.register_forward_hook, "a forward hook"),
        (nn.Module.register_full_backward_pre_hook, "a backward pre hook"),
        (nn.Module.register_full_backward_hook, "a backward hook"),
        (nn.Module.register_backward_hook, "a backward hook"),
        (nn.Module.register_state_dict_pre_hook, "a state dict pre hook"),
        (nn.Module.register_state_dict_post_hook, "a state dict hook"),
        (nn.Module.register_load_state_dict_pre_hook, "a load state dict pre hook"),
        (nn.Module.register_load_state_dict_post_hook, "a load state dict post hook"),
        (lambda layers, _: layers.register_parameter("scale", nn.Parameter(torch.ones(1))), r"a parameter \('scale'\)"),
        (lambda layers, _: layers.register_buffer("offset", torch.ones(1)), r"a buffer \('offset'\)"),
    ],
)
def test_hooks_and_tensors_of_the_model_itself_are_refused(register, lost):
    layers = make_linears()
    register(layers, lambda *arguments: None)
    with pytest.raises(ValueError, match=f"the model itself, not one of its layers, has {lost}, which .* would lose"):
        gpipe.GPipe(layers, [2, 2])


def test_lazy_layers_are_refused_until_they_have_run():
    for lazy, name in ((nn.LazyLinear(3), "weight"), (nn.LazyBatchNorm1d(affine=False), "running_mean")):
        layers = nn.Sequential(lazy)
        with pytest.raises(ValueError, match=f"'0.{name}' of a lazy layer is not initialized; run the model once"):
            gpipe.GPipe(layers, [1])
        layers(torch.rand(4, 3))
        gpipe.GPipe(layers, [1])(torch.rand(4, 3))
