"""Arguments, models and inputs that a pipeline refuses."""

import pytest
import torch
from torch import nn

import gpipe
from layers import Double, make_linears


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"balance": None}, gpipe.pipeline.BalanceError, r"balance is empty; give .*\[4\](.|\n)*gpipe\.balance"),
        ({"chunks": 0}, ValueError, "chunks must be positive, but is 0"),
        ({"chunks": -1}, ValueError, "chunks must be positive, but is -1"),
        ({"chunks": 2.5}, TypeError, "chunks must be an integer, but is 2.5"),
        ({"chunks": True}, TypeError, "chunks must be an integer, but is True"),
        ({"chunks": "2"}, TypeError, "chunks must be an integer, but is '2'"),
        ({"chunks": None}, TypeError, "chunks must be an integer, but is None"),
        (
            {"checkpoint": "INVALID"},
            ValueError,
            "checkpoint must be 'always', 'except_last' or 'never', but is 'INVALID'",
        ),
        ({"checkpoint": None}, TypeError, "checkpoint must be 'always', 'except_last' or 'never', but is None"),
        ({"balance": 2}, TypeError, r"balance must be a list .*, but is 2(.|\n)*gpipe\.balance"),
        ({"balance": [2.0, 2]}, TypeError, "each number of a balance must be an integer, but is 2.0"),
        ({"balance": [3, True]}, TypeError, "each number of a balance must be an integer, but is True"),
        ({"balance": [2]}, ValueError, r"balance \[2\] sums to 2, but the model has 4 layers(.|\n)*gpipe\.balance"),
        (
            {"balance": [4, 0]},
            ValueError,
            r"balance is \[4, 0\], but every stage needs at least one layer(.|\n)*gpipe\.balance",
        ),
        ({"devices": ["cpu"]}, IndexError, "too few devices: 2 workers, but 1 devices"),
        ({"devices": "cpu"}, TypeError, "devices must be a list with one device per worker, but is 'cpu'"),
        ({"devices": torch.device("cpu")}, TypeError, r"devices must be a list.* but is device\(type='cpu'\)"),
        ({"devices": [True, True]}, TypeError, "a device must be .*, but is True"),
        ({"devices": []}, IndexError, "devices is empty; give one device per worker"),
        (
            {"devices": ["cuda:99"] * 2},
            IndexError,
            "device cuda:99 does not exist: this process sees [0-9]+ CUDA device",
        ),
        ({"devices": ["meta"] * 2}, IndexError, "device meta:0 does not exist: this process sees 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        gpipe.GPipe(make_linears(), **{"balance": [2, 2], **arguments})


def test_interleaved_stages_share_the_devices_that_are_given():
    for schedule in ("interleaved_1f1b", "interleaved_zb"):
        pipe = gpipe.GPipe(make_linears(), [1] * 4, devices=["cpu"] * 2, schedule=schedule)
        assert pipe.placement == [0, 1, 0, 1] and len(pipe.devices) == 2


def test_models_that_cannot_be_cut_are_refused():
    with pytest.raises(TypeError, match="module must be nn.Sequential to be partitioned, but is .*ModuleList"):
        gpipe.GPipe(nn.ModuleList([nn.Linear(1, 1)]), [1])
    layer = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="layers '0' and '1' are the same module; use a copy"):
        gpipe.GPipe(nn.Sequential(layer, layer), [1, 1])


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
        (nn.Module.register_forward_pre_hook, "a forward pre-hook"),
        (nn.Module.register_forward_hook, "a forward hook"),
        (nn.Module.register_full_backward_pre_hook, "a backward pre-hook"),
        (nn.Module.register_full_backward_hook, "a backward hook"),
        (nn.Module.register_backward_hook, "a backward hook"),
        (nn.Module.register_state_dict_pre_hook, "a state-dict pre-hook"),
        (nn.Module.register_state_dict_post_hook, "a state-dict hook"),
        (nn.Module.register_load_state_dict_pre_hook, "a load-state-dict pre-hook"),
        (nn.Module.register_load_state_dict_post_hook, "a load-state-dict post-hook"),
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


@pytest.mark.parametrize("input", [[1], {"a": "text"}, None, "text", 1, (torch.zeros(1), 2), torch.Size([1])])
def test_inputs_of_other_types_are_refused(input):
    with pytest.raises(TypeError, match="expected Tensor, but got"):
        gpipe.GPipe(make_linears(), [4])(input)


def test_tensors_without_a_common_batch_dimension_are_refused():
    pipe = gpipe.GPipe(nn.Sequential(Double()), [1], chunks=2)
    with pytest.raises(ValueError, match="no dimensions"):
        pipe(torch.tensor(1.0))
    with pytest.raises(ValueError, match="unequal batch sizes"):
        pipe((torch.zeros(8), torch.zeros(3)))
    with pytest.raises(TypeError):
        pipe(torch.zeros(1), torch.zeros(1))
