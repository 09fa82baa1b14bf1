"""Comparisons of a model with its sequence, and the proof that dimension 0 is the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe.exported.blocks import Calls, autocast_dtype
from gpipe.exported.exporter import mode, unchanged
from gpipe.exported.guards import changes_in, device_kinds
from gpipe.exported.pretended import pretend
from gpipe.exported.read import Read


class Twins:
    """A model and its sequence, which ``call`` calls with the model's arguments. Compares outputs, gradients, buffers and
    attributes.

    Args:
        exported: the modules outside the ``blocks``, by path.
        read: what their code reads.
        modes: those in which it was exported.
        calls: were recorded with ``arguments``. The blocks of both repeat them, so that comparisons cost little.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Any, Any], Any],
        exported: Mapping[str, nn.Module],
        blocks: Iterable[nn.Module],
        read: Read,
        modes: tuple[bool, ...],
        arguments: Any,
        calls: Calls,
    ) -> None:
        self._module, self._call, self._calls, self._blocks, self._arguments = module, call, calls, list(blocks), arguments
        self._exported, self._read, self._modes = exported, read, modes
        self._given = False  # whether blocks ignore tensors that only the sequence gives them

    def _difference(
        self,
        arguments: Any,
        calls: int = 1,
        dtype: torch.dtype | None = None,
        *,
        replay: bool = True,
        gradients: bool = True,
        with_itself: bool = False,
        **tolerance: Any,
    ) -> str:
        blocks = self._blocks if replay else []
        # Code between blocks may change attributes of blocks.
        modules = self._exported if blocks and calls == 1 else dict(self._module.named_modules())
        with self._calls.replayed(blocks, dtype, given=self._given) as probes:
            options = calls, probes if gradients else None, self._read if calls > 1 else None
            plain = lambda args, kwargs: self._module(*args, **kwargs)
            ours = _behaviour(modules, arguments, plain, *options)
            return difference(ours, _behaviour(modules, arguments, plain if with_itself else self._call, *options), **tolerance)

    def agree(self, arguments: Any) -> bool:
        """Returns whether both do the same, or raise, in the modes that count."""
        for training in self._modes:
            with mode(self._module, training):
                reason = self._difference(arguments)
                if reason and self._blocks and not self._calls.without_values:  # an export may call them with a mask more
                    with torch.no_grad():
                        reason = self._difference(arguments, replay=False)
                if reason:
                    return False
        return True

    def compare(self) -> None:
        """Compares both in training and in evaluation mode. Raises ValueError if they differ."""
        module, arguments = self._module, self._arguments
        for training in (True, False):
            with mode(module, training):
                reason = self._difference(arguments, calls=2)
                if self._blocks and (reason or self._given):  # an export may call them with a mask that the model leaves out
                    self._given = True
                    reason = self._difference(arguments, calls=2, replay=self._calls.without_values)
                    if not self._calls.without_values and self._difference(arguments):
                        self._blocks = []
                elif self._blocks and training in self._modes and not self._calls.without_values:
                    reason = self._influence()
                if reason:
                    advice = next((advice for part, advice in _ADVICE.items() if part in reason), "")
                    text = f"its layers would not do what it does: {reason}{advice}"
                    raise ValueError(f"cannot convert the model ({type(module).__name__}): {text}")

    def _influence(self) -> str:
        """Returns how blocks behave otherwise in the sequence; an empty text if the model does not repeat itself either. Code
        between blocks may set an attribute of one, or a global, for a call."""
        compared = partial(self._difference, self._arguments, replay=False, gradients=False, part=0.02)
        reason = compared()
        return f"code around its blocks changes what they do: {reason}" if reason and not compared(with_itself=True) else ""

    def tested(self) -> dict[str, str]:
        """Compares both in each mode of torch that calls may have, and for other types. Returns how they differ, as
        :class:`Guards` takes it."""
        tested = {} if self._blocks else {_MIXED: ""}  # the modules whose modes decide are guards of their own
        for about, setting, arguments, options in self._settings():
            for training in self._modes:
                with mode(self._module, training), setting():
                    if "autocast" in about and self._blocks and training:
                        self._record()
                    reason = self._difference(arguments, **options)
                    compute = self._given and self._blocks and not self._calls.without_values
                    if "autocast" in about and compute:  # rounding differs, so only shapes and types
                        reason = reason or self._difference(arguments, replay=False, atol=math.inf, rtol=0)
                tested[about] = tested.get(about) or reason
        return tested

    def _settings(self) -> Iterator[tuple[str, Callable[[], AbstractContextManager[object]], Any, dict[str, Any]]]:
        """Yields what differs from the conversion in words, a context that makes it so, arguments, and options of a comparison."""
        module, arguments = self._module, self._arguments
        with_grad = tree_map_only(Tensor, lambda each: copy_of(each).requires_grad_(each.is_floating_point()), arguments)
        yield "without grad mode", torch.no_grad, arguments, {}
        yield "in inference mode", torch.inference_mode, arguments, {}
        yield "for inputs that require grad", nullcontext, with_grad, {}
        yield "for inputs that are not contiguous", nullcontext, tree_map_only(Tensor, _strided, arguments), {"gradients": False}
        for kind in device_kinds(module):
            if now := autocast_dtype(kind):
                yield f"without autocast on {kind}", partial(torch.autocast, kind, enabled=False), arguments, {}
            for dtype in {torch.bfloat16, *(() if kind == "cpu" else (torch.float16,))} - {now}:
                yield f"under autocast to {dtype} on {kind}", partial(torch.autocast, kind, dtype), arguments, {}
        for dtype in _FLOATS | _INTEGERS:
            others = tree_map_only(Tensor, partial(_of_dtype, dtype), arguments)
            if any(each is not other for each, other in zip(tree_leaves(others), tree_leaves(arguments))):
                yield f"for inputs of {dtype}", nullcontext, others, {"gradients": False}
        if self._blocks:
            yield _MIXED, self._blocks_in_other_modes, arguments, {"gradients": False}
        own = chain.from_iterable((*each.parameters(False), *each.buffers(False)) for each in self._exported.values())
        if self._blocks and not self._given and not any(tensor.is_floating_point() for tensor in own):
            for dtype in _FLOATS - {torch.uint8} - {parameter.dtype for parameter in module.parameters()}:
                cast = tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, arguments)
                yield f"with parameters of {dtype}", partial(self._pretending, dtype), cast, {"gradients": False, "dtype": dtype}

    @contextmanager
    def _blocks_in_other_modes(self) -> Iterator[None]:
        for each in self._blocks:
            each.training = not self._module.training
        yield

    @contextmanager
    def _pretending(self, dtype: torch.dtype) -> Iterator[None]:
        with unchanged(self._module.modules()):
            pretend(self._module, dtype)
            yield

    def _record(self) -> None:
        """Records what the blocks return under the present autocast, unless the model raises."""
        if self._calls.without_values:
            return
        with unchanged(self._module.modules()), self._calls.recorded(self._module), torch.no_grad(), suppress(Exception):
            args, kwargs = tree_map_only(Tensor, copy_of, self._arguments)
            self._module(*args, **kwargs)


_ADVICE = {
    "no module has registered": "; make it a parameter of a module, put it into nn.ParameterList, or its module into nn.ModuleList",
    "of a second call": "; if it draws from random or NumPy, or keeps something for a next call, move that to a submodule that is "
    "called once, and so kept whole",
}
_MIXED = "with modules in different modes"
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8}  # that inputs of floats may become
_INTEGERS = {torch.uint8, torch.int32, torch.int64}


def _of_dtype(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Returns a tensor with a dtype, if a user may give it with that too."""
    kinds = _FLOATS if tensor.is_floating_point() else _INTEGERS
    return tensor.detach().to(dtype) if {dtype, tensor.dtype} <= kinds and dtype != tensor.dtype else tensor


def _strided(tensor: Tensor) -> Tensor:
    return tensor.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(tensor.requires_grad)


def copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)


def _behaviour(
    modules: Mapping[str, nn.Module],
    arguments: Any,
    call: Callable[[Any, Any], Any],
    calls: int,
    probes: list[Tensor] | None,
    read: Read | None = None,
) -> dict[str, Any] | Exception:
    """Returns what calls of a model or sequence in a row return, with gradients, and leave in the buffers of modules, by name; or
    the exception that they raise. Leaves gradients out without ``probes``. With ``read``, tells what changes in the modules and
    there."""
    changes = changes_in(modules, read) if read else set
    found: dict[str, Any] = {}
    leaves: list[list[Tensor]] = []  # of each call, without parameters and inputs
    with unchanged(modules.values(), seed=0):
        for number in ("", " of a second call")[:calls]:
            own = tree_map_only(Tensor, copy_of, arguments)  # which the model may change
            try:
                outputs = tree_leaves(call(*own))
            except Exception as error:
                return error
            found |= {f"output {index}{number}": output for index, output in enumerate(outputs)}
            buffers = chain.from_iterable(each.named_buffers(path, False) for path, each in modules.items())
            found |= {f"buffer '{name}'{number}": buffer.clone() for name, buffer in buffers}
            if probes is None:
                continue
            parameters = chain.from_iterable(each.named_parameters(path, False) for path, each in modules.items())
            wanted: dict[str, Tensor] = {f"the gradient of '{name}'": each for name, each in parameters if each.requires_grad}
            wanted |= {f"the gradient of a block's output {index}": each for index, each in enumerate(probes)}
            wanted |= {f"the gradient of input {index}": each for index, each in enumerate(tree_leaves(own)) if _needs_grad(each)}
            roots = [each for each in outputs if _needs_grad(each)]
            leaves.append([each for each in _leaves_of(roots) if all(each is not other for other in wanted.values())])
            for index, each in enumerate(leaves[-1]):  # those of one call may be made in it
                if any(each is other for other in leaves[0]) and number:
                    wanted[f"the gradient of tensor {index} that requires grad and that no module has registered"] = each
            if roots and wanted and len(leaves) == calls:
                given = [torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype, device=each.device).view(each.shape) for each in roots]
                try:
                    found.update(zip(wanted, torch.autograd.grad(roots, [*wanted.values()], given, allow_unused=True)))
                except RuntimeError as error:
                    return error
        found |= {f"a change of {where!r}, {what},": "there" for where, what in changes()}
    return found


def _leaves_of(roots: list[Tensor]) -> Iterator[Tensor]:
    """Yields the leaves of the autograd graph of some tensors."""
    nodes: list[Any] = [each.grad_fn for each in roots]
    seen: set[Any] = {None}
    for node in nodes:  # which grows
        if node not in seen:
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf


def _needs_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


def difference(ours: Any, theirs: Any, part: float = 0, **tolerance: Any) -> str:
    """Returns the first difference of two behaviours; an empty text if there is none. Both may raise. Tensors may differ by a
    ``part`` of the largest element."""
    if isinstance(ours, Exception):
        return "" if isinstance(theirs, Exception) else f"the model raises {type(ours).__name__}, the layers do not"
    if isinstance(theirs, Exception):
        return f"the layers raise {type(theirs).__name__}: {theirs}"
    for name in ours | theirs:
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, str) or isinstance(other, str):
            if mine != other:
                return f"{name} differs: {mine or 'none'} or {other or 'none'}"
            continue
        tensors = isinstance(mine, Tensor) and isinstance(other, Tensor) and mine.layout == other.layout == torch.strided
        if tensors and (mine.dtype, mine.device) == (other.dtype, other.device) and torch.equal(mine, other):
            continue  # assert_close() takes longer
        try:
            torch.testing.assert_close(mine, other, equal_nan=True, **_tolerance(mine, part) | tolerance)
        except (AssertionError, TypeError) as error:
            return f"{name} differs: {next(line for line in str(error).splitlines() if line.strip())}"
    return ""


# By how much tensors may differ that are computed in another order: as a part of the element or of the largest one, and at least.
# For float64 less than usual, which would let through what float32 rounds inside.
_TOLERANCES = {torch.float32: (1.3e-6, 1e-5), torch.float64: (1e-10, 1e-10)}


def _tolerance(value: Any, part: float) -> dict[str, float]:
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.numel()
    if not is_float or not (part or value.dtype in _TOLERANCES):
        return {}
    usual, least = _TOLERANCES.get(value.dtype, (0, 0))
    part = max(part, usual)
    return {"rtol": part, "atol": max(least, part * float(value.detach().abs().nan_to_num(0, 0, 0).max()))}


def prove_batch(module: nn.Module, arguments: Any, output: Any, calls: Calls, batch_dim: int) -> bool:
    """Raises ValueError if what a model returns for a sample depends on the other samples, so that dimension 0 is not the batch.
    ``output`` is what the model returns in evaluation mode. In training mode, norms and dropout stay in evaluation mode. Lets
    batch norm without running statistics through, and random outputs. Adds the shapes for fewer samples to ``calls``. Messages
    name ``batch_dim``, the dimension that the caller uses as the batch. Returns whether the model takes fewer samples."""

    def outputs(begin: int = 0, end: int | None = None, runs: int = 1) -> list[Tensor]:
        with unchanged(module.modules(), seed=0):
            for _ in range(runs):
                args, kwargs = tree_map_only(Tensor, lambda each: each[begin:end].clone(), arguments)
                found = module(*args, **kwargs)
        return _tensors_in(found)

    samples = len(next(each for each in tree_leaves(arguments) if isinstance(each, Tensor)))
    part = max(samples // 2, min(2, samples - 1))  # code may treat one sample differently
    unproved = any(isinstance(each, _NormBase) and each.running_mean is None for each in module.modules())
    for training in (False, True) if any(calls.of_mode.values()) or not calls.sees_code else (False,):
        with mode(module, training):  # with grad mode, as for ``output``: code and kernels may differ without
            for each in module.modules():
                if isinstance(each, (_NormBase, _DropoutNd)):
                    each.training = False
            whole = outputs() if training else _tensors_in(output)
            if training and all(map(_is_close, whole, _tensors_in(output))):
                break  # it computes the same
            try:
                with (few := Calls()).recorded(module):
                    first = outputs(0, part)
                last = outputs(samples - part)
            except Exception:  # for so few samples, or the export explains it
                return False
            calls.fewer = few.shapes if not training else calls.fewer
            if calls.without_values or unproved:
                break
            for number, (joined, *parts) in enumerate(zip(whole, first, last)):
                rows = len(parts[0]) if parts[0].dim() else 0
                if rows == 0 or rows * samples != len(joined) * part:
                    continue  # it is named later
                if all(map(_is_close, (joined[:rows], joined[-rows:]), parts)):
                    continue
                if not torch.equal(outputs(runs=2)[number].nan_to_num(), joined.nan_to_num()):
                    continue  # it is random, maybe by a generator of its own
                where = " in training mode" if training else ""
                advice = "leave out batch_dim" if batch_dim else "give the batch as dimension 0 (batch_first=True), or batch_dim=1"
                raise ValueError(
                    f"cannot convert the model: output {number} for one sample depends on the other samples of the mini-batch"
                    f"{where}, which a pipeline cuts along dimension {batch_dim}; {advice}, and compute losses and statistics over "
                    "samples in the loss function"
                )
    return True


def _tensors_in(output: Any) -> list[Tensor]:
    return [each.detach() for each in tree_leaves(output) if isinstance(each, Tensor)]


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.equal(ours, theirs)
    return torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3, equal_nan=True)
