"""Snapshots: writing, reading, capturing and restoring a training state."""

import fcntl
import io
import os
import resource
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

import gpipe
import programs
from gpipe import snapshot
from gpipe.snapshot import Snapshot

# Optimizers with options, and the names of the state that LibTorch's classes hold per parameter.
OPTIMIZERS = [
    (Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}, {"step", "sum"}),
    (Adam, {"betas": (0.5, 0.75)}, {"step", "exp_avg", "exp_avg_sq"}),
    (Adam, {"amsgrad": True}, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    (AdamW, {"weight_decay": 0.3}, {"step", "exp_avg", "exp_avg_sq"}),
    (RMSprop, {}, {"step", "square_avg"}),
    (RMSprop, {"momentum": 0.5, "centered": True}, {"step", "square_avg", "momentum_buffer", "grad_avg"}),
    (SGD, {}, set()),
    (SGD, {"momentum": 0.9, "nesterov": True}, {"momentum_buffer"}),
]
LIBTORCH_OPTIONS = {
    Adagrad: {"lr": float, "lr_decay": float, "weight_decay": float, "initial_accumulator_value": float, "eps": float},
    Adam: {"lr": float, "betas": tuple, "eps": float, "weight_decay": float, "amsgrad": bool},
    AdamW: {"lr": float, "betas": tuple, "eps": float, "weight_decay": float, "amsgrad": bool},
    RMSprop: {"lr": float, "alpha": float, "eps": float, "weight_decay": float, "momentum": float, "centered": bool},
    SGD: {"lr": float, "momentum": float, "dampening": float, "weight_decay": float, "nesterov": bool},
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2, bias=False))


def groups_of(model):
    named = dict(model.state_dict(keep_vars=True))
    weights = [named["3.weight"], named["0.weight"]]
    rest = [named["0.bias"], named["1.weight"], named["1.bias"]]
    return [{"params": weights}, {"params": rest, "lr": 1}]  # an integer learning rate must work too


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.linspace(-1, 1 + step, 18).view(6, 3)
        model(inputs).square().sum().backward()
        optimizer.step()


def trained(kind=AdamW, **options):
    pipe = gpipe.GPipe(make_model(), [1, 3], chunks=2)
    optimizer = kind(groups_of(pipe), **options)
    train(pipe, optimizer, 3)
    return pipe, optimizer


def make_snapshot():
    pipe, optimizer = trained(amsgrad=True)
    return Snapshot(
        model=snapshot.capture_model(pipe),
        optimizer=snapshot.capture_optimizer(optimizer, pipe),
        epoch=7,
        position={"batch": 3, "seed": -70000},
        random=torch.get_rng_state(),
        options={"data": "a folder/ä", "empty": ""},
        history={"loss": [0.1, 1e-300, 2.0], "nothing": []},
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_a_written_snapshot_reads_back_equal(tmp_path):
    saved = make_snapshot()
    snapshot.write(tmp_path / "latest", saved)
    read = snapshot.read(tmp_path / "latest")
    assert same(vars(read), vars(saved))
    plain = torch.load(tmp_path / "latest", weights_only=True)
    assert plain.pop("format") == "gpipe snapshot" and plain.pop("version") == 1
    assert same(plain, vars(saved))
    snapshot.write(tmp_path / "empty", Snapshot())
    assert snapshot.read(tmp_path / "empty") == Snapshot()


def test_views_are_saved_without_the_rest_of_their_storage(tmp_path):
    large = torch.arange(100000.0, requires_grad=True)
    model = {"part": large[10:13], "parameter": nn.Parameter(torch.ones(2)), "turned": torch.arange(6).view(2, 3).t()}
    snapshot.write(tmp_path / "file", Snapshot(model=model))
    assert (tmp_path / "file").stat().st_size < 10000
    read = snapshot.read(tmp_path / "file").model
    assert torch.equal(read["part"], torch.tensor([10.0, 11, 12])) and not read["part"].requires_grad
    assert type(read["parameter"]) is torch.Tensor
    assert torch.equal(read["turned"], model["turned"])


@pytest.mark.parametrize("kind, options, state_names", OPTIMIZERS)
def test_a_restored_optimizer_continues_equally(kind, options, state_names, tmp_path):
    pipe, optimizer = trained(kind, **options)
    state = snapshot.capture_optimizer(optimizer, pipe)
    assert state["type"] == kind.__name__
    assert state["param_groups"][0]["params"] == ["3.weight", "0.weight"]
    for group in state["param_groups"]:
        assert {name: type(group[name]) for name in group if name != "params"} == LIBTORCH_OPTIONS[kind]
    assert set().union(*state["state"].values()) == state_names
    assert len(state["state"]) == (5 if state_names else 0)
    snapshot.write(tmp_path / "file", Snapshot(model=pipe.state_dict(), optimizer=state))
    saved = snapshot.read(tmp_path / "file")

    twin = gpipe.GPipe(make_model(), [2, 1, 1], chunks=2)
    other = kind([{**group, "params": group["params"][::-1]} for group in groups_of(twin)], lr=0.5)
    train(twin, other, 1)
    snapshot.restore_model(twin, saved.model)
    snapshot.restore_optimizer(other, twin, saved.optimizer)
    again = snapshot.capture_optimizer(other, twin)
    assert same(again["state"], state["state"])
    for group, expected in zip(again["param_groups"], state["param_groups"], strict=True):
        assert same(group | {"params": sorted(group["params"])}, expected | {"params": sorted(expected["params"])})
    # The state has the types that torch.optim uses.
    names = {id(tensor): name for name, tensor in pipe.state_dict(keep_vars=True).items()}
    states_of_twin = {name: other.state.get(tensor) for name, tensor in twin.state_dict(keep_vars=True).items()}
    for tensor, values in optimizer.state.items():
        values = {key: value for key, value in values.items() if value is not None}
        assert same(values, dict(states_of_twin[names[id(tensor)]] or {}))

    train(pipe, optimizer, 2)
    train(twin, other, 2)
    assert same(dict(twin.state_dict()), dict(pipe.state_dict()))


def test_restoring_copies_the_state():
    pipe, optimizer = trained()
    state = snapshot.capture_optimizer(optimizer, pipe)
    before = state["state"]["0.weight"]["exp_avg"].clone()
    snapshot.restore_optimizer(optimizer, pipe, state)
    train(pipe, optimizer, 1)
    assert torch.equal(state["state"]["0.weight"]["exp_avg"], before)


def damaged(change):
    pipe, optimizer = trained(amsgrad=True)
    state = snapshot.capture_optimizer(optimizer, pipe)
    change(state)
    return state


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.update(type="SGD"), "it is of class SGD, but this one is of class AdamW"),
        (lambda state: state["param_groups"].pop(), "it has 1 groups of parameters, but this one has 2"),
        (lambda state: state["param_groups"][0]["params"].pop(), "group 0 lacks '0.weight'"),
        (lambda state: state["param_groups"][1]["params"].append("5.bias"), "group 1 also has '5.bias'"),
        (lambda state: state["param_groups"][1].pop("eps"), "its 'eps' of group 1 is None, not a float"),
        (lambda state: state["param_groups"][0].update(amsgrad=1), "its 'amsgrad' of group 0 is 1, not a bool"),
        (lambda state: state["param_groups"][0].update(betas=0.9), "its 'betas' of group 0 is 0.9, not a pair"),
        (lambda state: state["state"]["0.bias"].pop("exp_avg"), "its 'exp_avg' of '0.bias' is missing"),
        (lambda state: state["state"]["0.bias"].pop("max_exp_avg_sq"), "its 'max_exp_avg_sq' of '0.bias' is missing"),
        (lambda state: state["state"]["0.bias"].update(exp_avg=torch.ones(3)), r"is torch.float32 of shape \(3,\)"),
        (lambda state: state["state"]["0.bias"].update(exp_avg=torch.ones(4).to_sparse()), "torch.sparse_coo, not a"),
        (lambda state: state["state"]["0.bias"].update(exp_avg=torch.ones(4, device="meta")), "without data, not a"),
        (lambda state: state["state"]["0.bias"].update(exp_avg=torch.ones(4).double()), "torch.float64 .*, not a"),
        (lambda state: state["state"]["0.bias"].update(exp_avg=1), "is 1, not a tensor"),
        (lambda state: state["state"]["0.bias"].update(step=1.5), "its 'step' of '0.bias' is 1.5, not an int"),
        (lambda state: state["state"].update({"1.running_mean": {}}), "it has the state of '1.running_mean'"),
    ],
)
def test_a_refused_restore_leaves_the_optimizer_unchanged(change, message):
    pipe, optimizer = trained(lr=0.5, amsgrad=True)
    before = snapshot.capture_optimizer(optimizer, pipe)
    with pytest.raises(ValueError, match=message):
        snapshot.restore_optimizer(optimizer, pipe, damaged(change))
    assert same(snapshot.capture_optimizer(optimizer, pipe), before)


def test_other_optimizers_cannot_be_captured():
    pipe = gpipe.GPipe(make_model(), [2, 2])
    with pytest.raises(TypeError, match="NAdam.*use one of torch.optim's Adagrad, Adam, AdamW, RMSprop, SGD"):
        snapshot.capture_optimizer(NAdam(pipe.parameters()), pipe)
    with pytest.raises(ValueError, match="parameter 0 in group 0 of the optimizer does not belong to the model"):
        snapshot.capture_optimizer(SGD(make_model().parameters()), pipe)
    with pytest.raises(ValueError, match="maximize=True.*negate the loss"):
        snapshot.capture_optimizer(SGD(pipe.parameters(), maximize=True), pipe)
    with pytest.raises(ValueError, match="decoupled_weight_decay=True.*use AdamW"):
        snapshot.capture_optimizer(Adam(pipe.parameters(), decoupled_weight_decay=True), pipe)


def test_a_refused_restore_leaves_the_model_unchanged():
    saved = snapshot.capture_model(make_model())
    model = make_model()
    nn.init.zeros_(model[0].weight)
    before = snapshot.capture_model(model)
    without = {name: tensor for name, tensor in saved.items() if name != "3.weight"}
    for wrong, message in [
        (without, "'3.weight' is missing in the snapshot"),
        (saved | {"4.weight": torch.ones(1)}, "'4.weight' is .* in the snapshot and missing in this model"),
        (saved | {"3.weight": torch.ones(2, 5)}, r"of shape \(2, 5\) in the snapshot"),
        (saved | {"3.weight": saved["3.weight"].double()}, "torch.float64"),
        (saved | {"3.weight": saved["3.weight"].to_sparse()}, "torch.sparse_coo in the snapshot"),
        (saved | {"3.weight": saved["3.weight"].to("meta")}, "without data in the snapshot"),
        (saved | {"3.weight": 1}, "<class 'int'> in the snapshot"),
    ]:
        with pytest.raises(ValueError, match=message):
            snapshot.restore_model(model, wrong)
        assert same(snapshot.capture_model(model), before)
    snapshot.restore_model(model, saved)
    assert same(snapshot.capture_model(model), saved)


def test_a_model_that_cannot_be_written_in_place_is_unchanged():
    with torch.inference_mode():
        made_in_inference_mode = torch.zeros(2)
    for tensor, message in [
        (torch.zeros(1).expand(2), "'last' of this model: some of its elements share memory"),
        (made_in_inference_mode, "'last' of this model: it was made in inference mode"),
    ]:
        model = make_model()
        model.register_buffer("last", tensor)
        saved = {name: tensor + 1 for name, tensor in snapshot.capture_model(model).items()}
        before = snapshot.capture_model(model)
        with pytest.raises(ValueError, match=message):
            snapshot.restore_model(model, saved)
        assert same(snapshot.capture_model(model), before)


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"position": {"seed": 2**63}}, ValueError, r"position\['seed'\] is 9223372036854775808"),
        ({"options": {"a": {1, 2}}}, TypeError, r"options\['a'\] is <class 'set'>"),
        ({"options": {"a": 1}}, TypeError, r"'options'\['a'\] is of type int, not str"),
        ({"history": {3: [0.5]}}, TypeError, "history has the key 3"),
        ({"model": {"a": torch.ones(2).to_sparse()}}, ValueError, "a tensor of torch.float32 and torch.sparse_coo"),
        ({"model": {"a": torch.ones(2, dtype=torch.float8_e5m2)}}, ValueError, "a tensor of torch.float8_e5m2"),
        ({"model": {"a": torch.ones(2, device="meta")}}, ValueError, "on meta"),
        (
            {"optimizer": {"type": "", "param_groups": [], "state": {"a": {"b": [{}]}}}},
            TypeError,
            "is of type dict, not a number",
        ),
        ({"model": {"a": [1.0]}}, TypeError, r"'model'\['a'\] is of type list, not Tensor"),
        ({"epoch": "1"}, TypeError, "'epoch' is of type str, not int"),
    ],
)
def test_a_snapshot_that_could_not_be_read_is_not_written(fields, error, message, tmp_path):
    with pytest.raises(error, match=message):
        snapshot.write(tmp_path / "file", Snapshot(**fields))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_previous_file(tmp_path):
    path = tmp_path / "latest"
    snapshot.write(path, Snapshot(epoch=1))
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot write: File too large: '.*latest'"):
            snapshot.write(path, Snapshot(epoch=2, random=torch.zeros(9000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [path]
    with open(f"{path}.tmp", "w") as other:
        other.write("left by a killed process" * 10000)
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another writer is writing this file"):
            snapshot.write(path, Snapshot(epoch=2))
    assert path.read_bytes() == before
    snapshot.write(path, Snapshot(epoch=3))
    assert snapshot.read(path).epoch == 3
    with pytest.raises(FileNotFoundError, match="no-folder/latest"):
        snapshot.write(tmp_path / "no-folder" / "latest", Snapshot())


def test_a_file_is_flushed_before_it_replaces_another(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    snapshot.write(path, Snapshot(epoch=1))
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(file):
        calls.append("fsync")
        fsync(file)

    def note_replace(source, target):
        calls.append(f"replace {snapshot.read(target).epoch} by {snapshot.read(source).epoch}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    snapshot.write(path, Snapshot(epoch=2))
    assert calls == ["fsync", "replace 1 by 2", "fsync"]


def test_damaged_files_are_refused_or_read_equal(tmp_path):
    path = tmp_path / "latest"
    saved = make_snapshot()
    snapshot.write(path, saved)
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 997), *range(len(whole) - 30, len(whole))]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{path}.*(not a zip archive|truncated)"):
            snapshot.read(path)
    refused = 0
    for at in range(0, len(whole), 131):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            assert same(vars(snapshot.read(path)), vars(saved)), at
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 20
    with pytest.raises(FileNotFoundError, match="missing"):
        snapshot.read(tmp_path / "missing")


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_files_that_are_not_snapshots_are_refused(tmp_path):
    path = tmp_path / "file"
    plain = {"format": "gpipe snapshot", "version": 1} | vars(Snapshot(model={"weight": torch.ones(2)}))
    touched = tmp_path / "touched"
    for content, message in [
        (torch.ones(2), "not a snapshot: the file contains a Tensor, not a dict"),
        ({"model": {}}, "not a snapshot: the file has no 'format'"),
        (plain | {"format": Touch(touched)}, "the pickle refers to '"),
        (plain | {"version": 2}, "the file has version 2, but this program reads versions up to 1: use a newer version"),
        ({name: value for name, value in plain.items() if name != "history"}, "the file has no 'history'"),
        (plain | {"epoch": "1"}, "'epoch' is of type str, not int"),
        (plain | {"optimizer": {"type": "SGD"}}, "'optimizer' has no 'param_groups'"),
    ]:
        torch.save(content, path)
        with pytest.raises(ValueError, match=f"cannot read the snapshot '{path}'.*{message}"):
            snapshot.read(path)
    assert not touched.exists()
    torch.save(plain, path)
    assert torch.equal(snapshot.read(path).model["weight"], torch.ones(2))
    path.write_text("no snapshot")
    with pytest.raises(ValueError, match="the file is not a zip archive"):
        snapshot.read(path)


CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"


def files_of_corpus():
    """Yields whole files, and pickles with the records that tests/fuzz/snapshot.cpp adds."""
    for path in sorted(CORPUS.glob("zip/*")):
        yield pytest.param(path.read_bytes(), path.name.startswith("accepted"), id=f"zip/{path.name}")
    for path in sorted(CORPUS.glob("snapshot/*")):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as records:
            for name, data in {"data.pkl": path.read_bytes(), "data/0": b"\1" * 64, "data/1": b""}.items():
                records.writestr(f"archive/{name}", data)
        yield pytest.param(file.getvalue(), path.name.startswith("accepted"), id=f"snapshot/{path.name}")


@pytest.mark.parametrize("content, accepted", list(files_of_corpus()))
def test_files_of_the_fuzz_corpus(content, accepted, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    if accepted:
        assert isinstance(snapshot.read(path), Snapshot)
    else:
        with pytest.raises(ValueError, match=f"cannot read the snapshot '{path}': "):
            snapshot.read(path)


def test_other_than_regular_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "sparse", "wb") as file:
        file.write(b"PK\3\4")
        file.truncate(2**42)
    for path, message in [("/dev/zero", "not a regular file"), (tmp_path / "pipe", "not a regular file")]:
        with pytest.raises(ValueError, match=message):
            snapshot.read(path)
    with pytest.raises(ValueError, match="damaged or truncated"):
        snapshot.read(tmp_path / "sparse")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        snapshot.read(tmp_path)
    with pytest.raises(ValueError, match="null byte"):
        snapshot.read("a\0b")


def test_strings_and_integers_of_any_value(tmp_path):
    options = {"path": os.fsdecode(b"\xff/\xc3\xa4"), "nul": "\0"}
    saved = Snapshot(options=options, position={"a": 2**63 - 1, "b": -(2**63)})
    snapshot.write(tmp_path / "file", saved)
    assert snapshot.read(tmp_path / "file") == saved


def test_conjugated_tensors_are_saved_with_their_values(tmp_path):
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    snapshot.write(tmp_path / "file", Snapshot(model={"conjugate": tensor.conj(), "imaginary": tensor.conj().imag}))
    read = snapshot.read(tmp_path / "file").model
    assert torch.equal(read["conjugate"], tensor.conj()) and torch.equal(read["imaginary"], torch.tensor([-2.0, 1]))


def test_if_the_folder_cannot_be_flushed_the_file_is_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    snapshot.write(path, Snapshot(epoch=1))
    fsync = os.fsync

    def fail_for_folders(file):
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(5, "Input/output error")
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(OSError, match="Input/output error"):
        snapshot.write(path, Snapshot(epoch=2))
    assert snapshot.read(path).epoch == 2


def test_snapshots_of_cpp_and_python_are_equal(tmp_path):
    flags = ["--samples", 8, "--scale", 0.25, "--batch-size", 4, "--depth", 1, "--channels", 4, "--epochs", 1]
    programs.run("unet/unet_train", *flags, "--balance", "11,12", "--output", tmp_path)
    path = tmp_path / "latest.snapshot"
    saved = snapshot.read(path)
    assert same(vars(saved), plain_of(path))

    pipe = gpipe.GPipe(gpipe.models.unet(depth=1, base_channels=4), [5, 18])
    optimizer = Adam(pipe.parameters())
    snapshot.restore_model(pipe, saved.model)
    snapshot.restore_optimizer(optimizer, pipe, saved.optimizer)
    torch.set_rng_state(saved.random)
    saved.model = snapshot.capture_model(pipe)
    saved.optimizer = snapshot.capture_optimizer(optimizer, pipe)
    assert len(saved.optimizer["state"]) == len(list(pipe.parameters())) > 10
    saved.random = torch.get_rng_state()
    again = tmp_path / "again.snapshot"
    snapshot.write(again, saved)
    # Equal bit by bit, except the order of keys.
    assert same(plain_of(again), plain_of(path))

    data = tmp_path / "synthetic_8_192x128_2"
    scores = []
    for model in (path, again):
        programs.run("unet/unet_evaluate", "--model", model, "--data", data, "--output", tmp_path / "scores")
        scores.append((tmp_path / "scores" / "scores.csv").read_text())
    assert scores[0] == scores[1] and len(scores[0].splitlines()) == 11


def plain_of(path):
    plain = torch.load(path, weights_only=True)
    assert plain.pop("format") == "gpipe snapshot" and plain.pop("version") == 1
    return plain
