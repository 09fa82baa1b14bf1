"""Models that are made on the meta device get their values from files, functions or their modules, each rank its own."""

import copy
import json
import math
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import gpipe
from gpipe.alone import profile_one_by_one
from gpipe.balance import profile
from helpers import named_gradients, results_of
from small_models import Net
from test_ranks import make_model


class Block(nn.Module):
    """Attention with rotary positions, which the code computes."""

    def __init__(self, width, persistent=False):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("angles", torch.empty(width // 2), persistent=persistent)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.angles.copy_(1 / 100 ** (torch.arange(len(self.angles)) / len(self.angles)))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).to(x.dtype), self.angles.to(x.dtype))
        q, k = (torch.cat([each * angles.cos().repeat(1, 2), each * angles.sin().repeat(1, 2)], -1) for each in (q, k))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Decoder(nn.Module):
    def __init__(self, width=8, tied=True, persistent=False, bias=False):
        super().__init__()
        self.words, self.blocks = nn.Embedding(20, width), nn.ModuleList(Block(width, persistent) for _ in range(3))
        self.head = nn.Linear(width, 20, bias=bias)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_transformers(kind, **options):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, vocab_size=20, use_cache=False, bos_token_id=0, eos_token_id=1, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "tied": Decoder,
    "untied": lambda: Decoder(tied=False, bias=True),
    "persistent tables": lambda: Decoder(persistent=True),
    "bfloat16": lambda: Decoder().bfloat16(),
    "gpt2": lambda: of_transformers("gpt2", n_layer=2, n_embd=16, n_head=2, n_positions=16),
    "tied llama": lambda: of_transformers("llama", tie_word_embeddings=True, **LLAMA),
}


def ids():
    return torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(0))


def loss(output, target):
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def trained(make, native, path=None):
    """Returns what a step computes, of a model that is whole, or whose values are in a file."""
    torch.manual_seed(0)
    with torch.device("meta" if path else "cpu"):
        model = make()
    init = getattr(model, "_init_weights", None) if path else None
    options = {"balance": None if path else trained.balance, "stages": 2 if path else None, "devices": ["cpu", "cpu"]}
    options |= {"chunks": 2, "schedule": "1f1b", "checkpoint": "never", "native": native, "weights": path, "init": init, "seconds": 0}
    pipe = gpipe.GPipe.from_module(model, ids().to("meta") if native and path else ids(), **options)
    trained.balance = pipe.balance
    torch.manual_seed(1)
    return pipe.step(ids(), ids(), loss), named_gradients(pipe), pipe.state_dict(), dict(pipe.named_buffers())


@pytest.mark.parametrize(
    ("name", "native"), [*((name, False) for name in MODELS), ("persistent tables", True), ("tied llama", True)]
)
def test_a_model_from_meta_equals_one_that_was_made_whole(name, native, tmp_path):
    torch.manual_seed(0)
    whole = MODELS[name]()
    torch.save(whole.state_dict(), tmp_path / "model.pth")
    actual = trained(MODELS[name], native, tmp_path / "model.pth")
    torch.testing.assert_close(actual, trained(MODELS[name], native), rtol=0, atol=0)


def files_of(state, folder):
    """Writes a state in the ways that weights may have."""
    state = {name: value.contiguous().clone() for name, value in state.items()}
    names = list(state)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for way in ("one", "some", "indexed"):
        (folder / way).mkdir()
        for file, inside in ({"model.safetensors": names} if way == "one" else parts).items():
            save_file({name: state[name] for name in inside}, folder / way / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (folder / "indexed" / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / "one" / "model.safetensors", *(folder / way for way in ("one", "some", "indexed")), state.__getitem__]


def test_values_come_from_files_folders_and_functions(tmp_path):
    state = make_model().state_dict()
    for weights in files_of(state, tmp_path):
        pipe = gpipe.GPipe(make_model("meta"), [4, 4], chunks=1, weights=weights)
        torch.testing.assert_close(dict(pipe.state_dict()), dict(state), rtol=0, atol=0)


@pytest.mark.parametrize(("change", "message"), [
    (lambda state: state.pop("head.bias"), "the weights have no 'head.bias'; near are "),
    (lambda state: state.update({"hed.bias": torch.ones(3)}), "the weights have 'hed.bias', which the model has not; near are 'head.bias'"),
    (lambda state: state.update({"head.bias": torch.ones(4)}), r"'head.bias' of the weights has the shape \(4,\), but the model's has \(3,\)"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_named_and_the_model_can_take_others(change, message, tmp_path):
    state = Net().state_dict() | {"table": torch.arange(4.0)}  # which no state has
    bad = dict(state)
    change(bad)
    torch.save(bad, tmp_path / "bad.pth")
    torch.save(state, tmp_path / "good.pth")
    with torch.device("meta"):
        net = Net()
    with pytest.raises(ValueError, match=message):
        gpipe.GPipe.from_module(net, torch.rand(4, 4), weights=tmp_path / "bad.pth")
    pipe = gpipe.GPipe.from_module(net, torch.rand(4, 4), weights=tmp_path / "good.pth")
    expected = {name: value for name, value in state.items() if name != "table"}
    torch.testing.assert_close(dict(pipe.state_dict()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("native", [False, True])
def test_tensors_that_nothing_gives_a_value_are_named(native):
    for attach, text in (
        (lambda layer, table: setattr(layer, "table", table), r"'table' of '0' \(Linear\) is a tensor on the meta device"),
        (lambda layer, table: layer.register_buffer("table", table, False), r"leaves a tensor of shape \(4,\) without values"),
    ):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            for each in model[::2]:
                attach(each, torch.ones(4))
        weights = {name: value.zero_() for name, value in copy.deepcopy(model).to_empty(device="cpu").state_dict().items()}
        with pytest.raises(ValueError, match=text):
            gpipe.GPipe.from_module(model, torch.rand(4, 4), native=native, weights=weights.__getitem__)
    with pytest.raises(ValueError, match="weights and init are for a model on the meta device"):
        gpipe.GPipe(nn.Sequential(nn.Linear(2, 2)), [1], weights=dict)


def fill(module):
    for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.normal_(each) if each.is_floating_point() else each.zero_()


@pytest.mark.parametrize("name, native", [("tied", False), ("gpt2", True)])
def test_layers_that_are_measured_one_at_a_time_have_the_sizes_of_the_whole_model(name, native):
    profiles = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = MODELS[name]()
        layers = gpipe.to_sequential(model, ids(), native=native)
        if device == "cpu":
            profiles.append(profile(layers, ids(), seconds=0, repeats=1, param_scale=4))
        else:
            before = torch.get_rng_state()
            profiles.append(profile_one_by_one(layers, ids(), device=torch.device("cpu"), threads=1, seconds=0))
            assert all(each.is_meta for each in model.parameters()) and torch.equal(torch.get_rng_state(), before)
    sizes = [[(each.parameters, each.gradients, each.optimizer, each.buffers, each.output) for each in of.layers] for of in profiles]
    assert sizes[0] == sizes[1]
    skips = [[(each.from_layer, each.reader_layers, each.bytes) for each in of.skips] for of in profiles]
    assert sorted(skips[0]) == sorted(skips[1])
    assert [(each.layers, each.bytes) for each in profiles[0].ties] == [(each.layers, each.bytes) for each in profiles[1].ties]
    for cut in ([2, len(sizes[0]) - 2], [len(sizes[0]) - 1, 1]):
        for checkpoint, schedule in product(("never", "always"), ("gpipe", "1f1b", "zb_h1")):
            predicted = [gpipe.balance.predict(each, cut, 4, checkpoint, schedule=schedule).bytes for each in profiles]
            assert all(counted <= 1.01 * bound for counted, bound in zip(*predicted, strict=True)), (cut, checkpoint, schedule, predicted)
            assert sum(predicted[1]) < (1.15 if (checkpoint, schedule) == ("never", "gpipe") else 1.6) * sum(predicted[0])


def test_a_model_that_a_device_cannot_hold_is_measured_layer_by_layer(monkeypatch):
    class Large(nn.Linear):
        def forward(self, x):
            if not alone:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    alone = []
    monkeypatch.setattr("gpipe.planning.profile_one_by_one", lambda *given, **options: alone.append(given) or profile_one_by_one(*given, **options))
    pipe = gpipe.GPipe.from_module(nn.Sequential(*(Large(8, 8) for _ in range(4))), torch.ones(8, 8), chunks=2, seconds=0)
    assert len(alone) == 1 and sum(pipe.balance) == 4


def plan_over_ranks(ranks):
    measured = []
    with torch.device("meta"):
        model = Decoder(tied=False)
    with patch("gpipe.alone.profile", lambda *given, **options: measured.append(given) or profile(*given, **options)):
        pipe = gpipe.GPipe.from_module(model, ids().to("meta"), chunks=2, group=ranks, init=fill, seconds=0)
    return pipe.plan, len(measured), float(pipe.step(ids(), ids(), loss))


def test_ranks_measure_a_share_of_the_layers_each():
    (plan, measured, result), *others = results_of(3, plan_over_ranks)
    assert [each[0] for each in others] == [plan, plan] and sum(plan["balance"]) == 6 and len(plan["balance"]) % 3 == 0
    assert [measured, *(each[1] for each in others)] == [2, 2, 2]
    assert math.isfinite(result)


def over_ranks(ranks, file, balance):
    with torch.device("meta"):
        model = Decoder(tied=False)
    options = {"chunks": 2, "checkpoint": "never", "schedule": "1f1b", "group": ranks}
    torch.manual_seed(0)
    pipe = gpipe.GPipe.from_module(model, ids(), balance=balance, weights=file, init=None if file else fill, **options)
    elsewhere = [name for name, each in model.named_parameters() if each.is_meta]
    result = pipe.step(ids(), ids(), loss)
    return float(result), {name: value.clone() for name, value in pipe.state_dict().items()}, elsewhere


@pytest.mark.parametrize("file", [True, False])
def test_each_rank_has_its_own_tensors_only_and_the_same_values(file, tmp_path):
    torch.manual_seed(0)
    whole = Decoder(tied=False).state_dict()
    save_file(dict(whole), tmp_path / "model.safetensors")
    path = str(tmp_path) if file else None
    cuts = [results_of(2, over_ranks, path, balance) for balance in ([2, 4], [4, 2])]
    states = [first[1] | second[1] for first, second in cuts]
    assert states[0].keys() == states[1].keys() == whole.keys()
    torch.testing.assert_close(*states, rtol=0, atol=0)
    if file:
        torch.testing.assert_close(states[0], dict(whole), rtol=0, atol=0)
    for first, second in cuts:
        assert first[2] and second[2] and not set(first[2]) & set(second[2])
        assert math.isclose(first[0], cuts[0][0][0])
