"""All that a training needs to go on as if it had never stopped, in one file: the one that the C++ programs write.

    snapshot.write("latest.snapshot", snapshot.Snapshot(
        model=snapshot.capture_model(pipe),
        optimizer=snapshot.capture_optimizer(optimizer, pipe),
        epoch=epoch,
        random=torch.get_rng_state(),
    ))

    saved = snapshot.read("latest.snapshot")
    snapshot.restore_model(pipe, saved.model)
    snapshot.restore_optimizer(optimizer, pipe, saved.optimizer)
    torch.set_rng_state(saved.random)

Everything goes by the names that the unpartitioned model gives its parameters, so that a snapshot fits the model at any
balance, in Python and in C++. The file is a zip pickle of a plain dict, with a key for each field of :class:`Snapshot`:
``torch.load(path, weights_only=True)`` reads it without this package.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer, RMSprop, SGD

__all__ = [
    "OptimizerState",
    "Snapshot",
    "capture_model",
    "capture_optimizer",
    "read",
    "restore_model",
    "restore_optimizer",
    "write",
]

_FORMAT = "gpipe snapshot"
_VERSION = 1


class OptimizerState(TypedDict):
    """An optimizer with its parameters by name: its class, the names and options of each group, and the state of each
    parameter that has any; options and state are called as LibTorch's classes and Python's call them."""

    type: str
    param_groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]


def _no_optimizer() -> OptimizerState:
    return {"type": "", "param_groups": [], "state": {}}


@dataclass
class Snapshot:
    """The state of a training.

    Attributes:
        model: parameters and buffers: what :func:`capture_model` returns, or ``state_dict()``.
        optimizer: what :func:`capture_optimizer` returns.
        epoch: epochs completed.
        position: where in the epoch the loader is, in its own terms.
        random: of PyTorch's default CPU generator: ``torch.get_rng_state()``, a ByteTensor.
        options: the program's, as given.
        history: losses and scores so far.
    """

    model: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: OptimizerState = field(default_factory=_no_optimizer)
    epoch: int = 0
    position: dict[str, int] = field(default_factory=dict)
    random: Tensor | None = None
    options: dict[str, str] = field(default_factory=dict)
    history: dict[str, list[float]] = field(default_factory=dict)


def write(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Replaces a file at once or not at all: whatever happens, the path names a whole snapshot, the previous one until
    this one is on the disk.

    Tensors may be on any device and require gradients; they are saved as plain ones on the CPU, each with no more of
    its storage than it shows.

    Raises:
        OSError: with the path and the reason; the previous file is then as it was. ``BlockingIOError`` while somebody
            else is writing the same one.
        TypeError, ValueError: for a snapshot that could not be read again, in Python or in C++; the message names what
            is wrong with it.
    """
    content = {"format": _FORMAT, "version": _VERSION}
    content |= {each.name: _plain(getattr(snapshot, each.name), each.name) for each in fields(Snapshot)}
    if fault := _fault(content):
        raise TypeError(f"cannot write this snapshot: {fault}")
    # In memory first: torch.save does not come through a write that fails.
    archive = io.BytesIO()
    torch.save(content, archive)
    with _replacing(os.fspath(path)) as file:
        file.write(archive.getbuffer())


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Reads what :func:`write` or a C++ program wrote. Executes nothing, whatever is in the file.

    Returns:
        The snapshot, its tensors on the CPU.

    Raises:
        OSError: for a file that is missing or cannot be read.
        ValueError: for one that is damaged, cut short, no snapshot, or of a newer version.
    """
    with open(path, "rb") as file:
        archive = io.BytesIO(file.read())
    try:
        content = _load(archive)
    except ValueError as error:
        raise ValueError(f"cannot read '{os.fspath(path)}': {error}") from error
    return Snapshot(**{each.name: content[each.name] for each in fields(Snapshot)})


def capture_model(model: nn.Module) -> dict[str, Tensor]:
    """Copies a model's parameters and buffers to the CPU, by the names that ``state_dict()`` gives them."""
    return {name: _copy(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copies tensors into a model's own, wherever those are.

    Raises:
        ValueError: for a name that only one of them has, or whose shape or dtype differs; the model is then as it was.
    """
    tensors = {name: _kind(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    for name in [*tensors, *saved]:
        here, there = tensors.get(name, "not there"), _kind(saved[name]) if name in saved else "not there"
        if here != there:
            raise ValueError(
                f"the snapshot is of another model: '{name}' is {there} in the snapshot and {here} in this model"
            )
    model.load_state_dict(saved)


def capture_optimizer(optimizer: Optimizer, model: nn.Module) -> OptimizerState:
    """Copies an optimizer's options and state, to the CPU.

    What only Python's classes have, such as ``foreach`` or ``capturable``, is not captured: it says how an optimizer
    computes, not what.

    Args:
        optimizer: of the class ``torch.optim.Adagrad``, ``Adam``, ``AdamW``, ``RMSprop`` or ``SGD``.
        model: names its parameters: a :class:`gpipe.GPipe` or the unpartitioned model.

    Raises:
        TypeError: for an optimizer of any other class.
        ValueError: for a parameter that is not the model's, or an option that LibTorch's class does not have.
    """
    layout = _layout_of(optimizer)
    captured: OptimizerState = {"type": type(optimizer).__name__, "param_groups": [], "state": {}}
    for group, names in zip(optimizer.param_groups, _names(optimizer, model), strict=True):
        _check_expressible(optimizer, group)
        options = {name: _converted(group[name], kind) for name, kind in layout.options.items()}
        captured["param_groups"].append({"params": names, **options})
        for name, parameter in zip(names, group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            kept: dict[str, Any] = {}
            kept.update((key, _copy(state[key])) for key in layout.tensors if isinstance(state.get(key), Tensor))
            if layout.counts and "step" in state:
                kept["step"] = int(state["step"])
            if kept:
                captured["state"][name] = kept
    return captured


def restore_optimizer(optimizer: Optimizer, model: nn.Module, state: OptimizerState) -> None:
    """Makes an optimizer what a captured one was: of the same class, over the same groups of parameters, in any order
    within a group. Tensors go to their parameters' devices. An optimizer that is refused is left as it was.

    Raises:
        TypeError: for an optimizer of a class that cannot be captured.
        ValueError: where the two differ: class, groups, names, shapes, or types.
    """
    layout = _layout_of(optimizer)
    if state["type"] != type(optimizer).__name__:
        _refuse(f"it is {state['type'] or 'none'}, and this one {type(optimizer).__name__}")
    groups = _names(optimizer, model)
    _check_groups(groups, [group["params"] for group in state["param_groups"]])

    restored = optimizer.state_dict()
    restored["state"] = {}
    for index, (names, saved) in enumerate(zip(groups, state["param_groups"], strict=True)):
        group = restored["param_groups"][index]
        options = {name: _option(saved, name, kind, f"group {index}") for name, kind in layout.options.items()}
        if isinstance(group["lr"], Tensor):
            options["lr"] = torch.full_like(group["lr"], options["lr"])
        group.update(options)
        parameters = optimizer.param_groups[index]["params"]
        for name, number, parameter in zip(names, group["params"], parameters, strict=True):
            if name in state["state"]:
                restored["state"][number] = _state(state["state"][name], name, parameter, options, layout)
    if surplus := state["state"].keys() - {name for names in groups for name in names}:
        _refuse(f"it has state of '{min(surplus)}', which this one does not have")
    optimizer.load_state_dict(restored)


# What each class of optimizer has, in LibTorch and in Python.


class _Layout(NamedTuple):
    options: dict[str, type]
    # State of a parameter's shape, and whether it must be there: maybe only with some option.
    tensors: dict[str, bool | str]
    counts: bool = True  # the steps, of each parameter


_ADAM = _Layout(
    {"lr": float, "betas": tuple, "eps": float, "weight_decay": float, "amsgrad": bool},
    {"exp_avg": True, "exp_avg_sq": True, "max_exp_avg_sq": "amsgrad"},
)
_LAYOUTS: dict[type[Optimizer], _Layout] = {
    Adagrad: _Layout(
        {"lr": float, "lr_decay": float, "weight_decay": float, "initial_accumulator_value": float, "eps": float},
        {"sum": True},
    ),
    Adam: _ADAM,
    AdamW: _ADAM,
    RMSprop: _Layout(
        {"lr": float, "alpha": float, "eps": float, "weight_decay": float, "momentum": float, "centered": bool},
        {"square_avg": True, "momentum_buffer": "momentum", "grad_avg": "centered"},
    ),
    SGD: _Layout(
        {"lr": float, "momentum": float, "dampening": float, "weight_decay": float, "nesterov": bool},
        {"momentum_buffer": False},  # the first step makes it
        counts=False,
    ),
}


def _layout_of(optimizer: Optimizer) -> _Layout:
    layout = _LAYOUTS.get(type(optimizer))
    if layout is None:
        known = ", ".join(sorted(kind.__name__ for kind in _LAYOUTS))
        raise TypeError(
            f"cannot capture or restore an optimizer of {type(optimizer)}: use one of torch.optim's {known}"
        )
    return layout


def _check_expressible(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """LibTorch's optimizers minimise, and its Adam couples weight decay."""
    unknown = ["maximize"] + ["decoupled_weight_decay"] * (type(optimizer) is Adam)
    for option in unknown:
        if group.get(option):
            advice = "negate the loss" if option == "maximize" else "use AdamW"
            raise ValueError(f"cannot capture {option}={group[option]}, which LibTorch's optimizers lack: {advice}")


def _names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of the optimizer's parameters, group by group."""
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    groups: list[list[str]] = []
    for group in optimizer.param_groups:
        groups.append([])
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {len(groups[-1])} in group {len(groups) - 1} of the optimizer is none of the model's: "
                    "make the optimizer of the model's parameters"
                )
            groups[-1].append(names[id(parameter)])
    return groups


def _check_groups(ours: list[list[str]], theirs: list[list[str]]) -> None:
    if len(ours) != len(theirs):
        _refuse(f"it has {len(theirs)} groups of parameters, and this one {len(ours)}")
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if lacking := set(our) - set(their):
            _refuse(f"group {index} lacks '{min(lacking)}'")
        if surplus := set(their) - set(our):
            _refuse(f"group {index} also has '{min(surplus)}'")


def _converted(value: Any, kind: type) -> Any:
    return tuple(float(each) for each in value) if kind is tuple else kind(value)


def _option(saved: dict[str, Any], name: str, kind: type, owner: str) -> Any:
    value = saved.get(name)
    pair = kind is tuple and isinstance(value, (tuple, list)) and len(value) == 2
    if type(value) is not kind and not pair:
        _refuse(f"its '{name}' of {owner} is {value!r}, and no {'pair' if kind is tuple else kind.__name__}")
    return _converted(value, kind)


def _state(
    saved: dict[str, Any], owner: str, parameter: Tensor, options: dict[str, Any], layout: _Layout
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, needed in layout.tensors.items():
        tensor = saved.get(name)
        if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
            state[name] = _copy(tensor)
        elif tensor is not None:
            what = tuple(tensor.shape) if isinstance(tensor, Tensor) else repr(tensor)
            _refuse(f"its '{name}' of '{owner}' is {what}, and no tensor of shape {tuple(parameter.shape)}")
        elif options[needed] if isinstance(needed, str) else needed:
            _refuse(f"its '{name}' of '{owner}' is missing")
    if layout.counts:
        if type(saved.get("step")) is not int:
            _refuse(f"its 'step' of '{owner}' is {saved.get('step')!r}, and no int")
        # Of the type that torch.optim makes.
        wide = torch.get_default_dtype() == torch.float64
        state["step"] = torch.tensor(float(saved["step"]), dtype=torch.float64 if wide else torch.float32)
    return state


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"the snapshot is of another optimizer: {what}")


# The file.


def _plain(value: Any, where: str) -> Any:
    """The same of types that torch.load(weights_only=True) and C++ read."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{where} is {value}; integers have 32 bits in LibTorch's reader, so make it a str")
        return int(value)
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if whole else tensor.clone()
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"{where} is {type(value)}; a snapshot holds tensors, numbers, str, and dicts and lists of them")


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}; make it a str")
    return str(key)


def _fault(content: dict[str, Any]) -> str:
    """What keeps a dict of plain values from being a snapshot."""
    kinds: dict[str, tuple[type, ...]] = {
        "model": (dict,),
        "optimizer": (dict,),
        "epoch": (int,),
        "position": (dict,),
        "random": (Tensor, type(None)),
        "options": (dict,),
        "history": (dict,),
    }
    for name, of in kinds.items():
        if name not in content:
            return f"it has no '{name}'"
        if not isinstance(content[name], of):
            return f"'{name}' is {type(content[name])}, and no {of[0].__name__}"
    for name, item in {"model": Tensor, "position": int, "options": str, "history": list}.items():
        for key, value in content[name].items():
            if not isinstance(value, item):
                return f"'{name}' has {type(value)} for {key!r}, and no {item.__name__}"
    for name, of_optimizer in {"type": str, "param_groups": list, "state": dict}.items():
        if not isinstance(content["optimizer"].get(name), of_optimizer):
            return f"'optimizer' has no {of_optimizer.__name__} '{name}'"
    if not all(isinstance(group, dict) and "params" in group for group in content["optimizer"]["param_groups"]):
        return "'optimizer' has a group without 'params'"
    return ""


def _load(archive: BinaryIO) -> dict[str, Any]:
    if archive.read(4) != b"PK\3\4":
        raise ValueError("it is no snapshot: no zip file")
    # torch.load does not look at checksums, and takes a flipped bit for a weight.
    try:
        with zipfile.ZipFile(archive) as records:
            broken = records.testzip()
    except Exception as error:  # the kinds are as many as the ways to be damaged
        raise ValueError(f"it is damaged or cut short: {error}") from error
    if broken:
        raise ValueError(f"it is damaged: the checksum of '{broken}' is wrong")
    archive.seek(0)
    try:
        content = torch.load(archive, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"it is no snapshot, but something else in a zip file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("it is no snapshot, but something else that torch saved")
    version = content.get("version")
    if not isinstance(version, int) or version > _VERSION:
        raise ValueError(f"its version is {version}, and this package reads up to {_VERSION}: read it with a newer one")
    if fault := _fault(content):
        raise ValueError(f"it is no snapshot: {fault}")
    return content


@contextmanager
def _replacing(path: str) -> Iterator[BinaryIO]:
    """A new file that takes the path's place once it is on the disk, if nothing was raised."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "ab") as file:  # which does not empty it: it may be another writer's
            _lock(file, temporary)
            try:
                file.truncate(0)
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        _flush_folder(os.path.dirname(path) or ".")
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "cannot write: somebody else is writing it", path) from None
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", path) from error


def _lock(file: BinaryIO, path: str) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # A writer that was just finishing may have renamed it.
    if not os.path.exists(path) or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))


def _flush_folder(folder: str) -> None:
    """A rename is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)
