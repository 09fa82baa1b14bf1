"""Losses of :meth:`gpipe.GPipe.step`: their options, and how losses of torch reduce."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from functools import cache, lru_cache, partial
from inspect import signature
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn._reduction import get_enum
from torch.nn.modules.module import _has_any_global_hook

from gpipe import _C
from gpipe.checks import Reduction, check_flag, check_function, check_number, checks_arguments, shown

_Result = TypeVar("_Result")


class Loss:
    """A loss function with options, for :meth:`gpipe.GPipe.step`. Make it once, before the loop.

        loss = gpipe.Loss(criterion, count=lambda target: (target != -100).sum())
        pipe.step(x, y, loss)

    Args:
        function: ``function(output, target)`` returns the loss of one micro-batch, a floating-point scalar that decomposes
            over samples.
        count: with ``'mean'``: ``count(target)`` returns how many elements the micro-batch's loss is the mean of, such as
            the targets that are not ignored. A tensor on a device is not waited for, except with replicas. Default: that of
            torch's cross entropy and NLL losses, else the number of samples.
        reduction: ``'mean'`` weights the micro-batches' losses by their share of samples, or of ``count``. ``'sum'`` adds
            them up. Default: that of a loss of torch, or a ``functools.partial`` of it, else ``'mean'``.
        check: whether the first step compares the loss and its gradients with those of the whole mini-batch, for which it
            calls ``function`` again. Variables, attributes, containers and buffers that the loss changes stay as they are.
            Compares again at the first target, of a sample of those on the CPU, that may weight or ignore samples in a new
            way: unequal shares of zeros, of negative numbers or of NaN in the micro-batches, unequal means, numbers out of
            the range so far, another most frequent integer. Does nothing if the reduction is known or given as ``'sum'``,
            or if the loss draws random numbers or takes no whole mini-batch. A loss of torch with hooks or replaced code is
            compared as others.

    Raises TypeError and ValueError for wrong options.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Tensor],
        *,
        count: Callable[[Any], float | Tensor] | None = None,
        reduction: Reduction | None = None,
        check: bool = True,
    ) -> None:
        if isinstance(function, Loss):
            raise TypeError("function is a gpipe.Loss already; pass the function that it has, or use it as it is")
        self.function = check_function(function, "loss", "output and target")
        self.count = None if count is None else check_function(count, "count", "a target")
        self.reduction = reduction
        self.check: bool = check_flag(check, "check")
        self._record = _C.LossRecord()
        _C.StepOptions(None, reduction, 1.0, False, 1, "never", check)  # refuses another reduction

    def __call__(self, output: Any, target: Any) -> Tensor:
        result: Tensor = self.function(output, target)
        return result

    def __reduce__(self) -> Any:  # a copy has compared nothing
        return partial(Loss, count=self.count, reduction=self.reduction, check=self.check), (self.function,)

    def options(self, scale: float, chunks: int, checkpoint: Any, return_output: bool) -> _C.StepOptions:
        """Returns the options of a step, with what a loss of torch tells: how it reduces, and of a mean over classes the
        weight and the ignored index."""
        reduction: str | None = self.reduction
        check = self.check
        counted: Any = None if self.count is None else partial(_counted, self.count)
        settings = None if self.count is not None else _settings_of(self.function)
        if settings is not None:
            is_plain, known = _is_plain(self.function), "sum" if settings["reduction"] == "sum" else "mean"
            if reduction in (None, known) and (is_plain or known == "mean"):
                reduction, check = known, check and not is_plain
                counted = (settings["weight"], settings["ignore_index"]) if known == "mean" and "ignore_index" in settings else None
        return _C.StepOptions(counted, reduction, scale, return_output, chunks, checkpoint, check)


class Losses:
    """What the comparisons of a pipeline know about functions that it was given without options, while these live."""

    def __init__(self) -> None:
        self._records: MutableMapping[object, dict[object, _C.LossRecord]] = WeakKeyDictionary()
        self._made: Counter[object] = Counter()  # functions by their code

    def loss_of(self, loss: Any, chunks: int) -> Loss:
        """Returns the Loss of a function. Warns once of functions that seem to be made anew in each step."""
        if isinstance(loss, Loss):
            return loss
        made = Loss(loss)
        owner, method = (loss.__self__, loss.__func__) if isinstance(loss, MethodType) else (loss, None)
        try:
            record = self._records.setdefault(owner, {}).setdefault(method, made._record)
        except TypeError:  # it has no hash, or no weak references
            record = made._record
        if record is made._record and chunks > 1 and isinstance(loss, FunctionType):
            self._made[loss.__code__] += 1
            if self._made[loss.__code__] == 4:
                warnings.warn(
                    "step() compares each loss function once with the whole mini-batch, but this one is made anew in each "
                    "step; make it once, before the loop, or give gpipe.Loss(function, check=False)",
                    stacklevel=4,
                )
        made._record = record
        return made


@checks_arguments
def check_loss(loss: Callable[[Any, Any], Tensor], output: Any, target: Any, chunks: int) -> tuple[float, float]:
    """Computes the loss of a whole mini-batch, and the loss that :meth:`gpipe.GPipe.step` would join from its
    micro-batches. They differ for a loss that does not decompose over samples, such as a contrastive loss: do not use
    ``step`` with it.

        whole, joined = gpipe.losses.check_loss(criterion, pipe(input), target, chunks=3)

    Args:
        loss: a function or a :class:`gpipe.Loss`; called without grad mode, on copies of the output.
        output: the model's output for the mini-batch, or any tensors like it.
        target: as for :meth:`gpipe.GPipe.step`, with its errors.
        chunks: the most micro-batches. Choose one that makes the last smaller: an even cut can hide a wrong weight.
    """
    whole = loss if isinstance(loss, Loss) else Loss(loss)
    return _C.check_loss(partial(loss_tensor, whole.function), output, target, whole.options(1.0, chunks, "never", False))


def check_scale(scale: object, device: torch.device) -> float:
    """Returns the factor of the gradients. A GradScaler's scale is made on ``device`` at its first use."""
    if isinstance(scale, GradScaler):
        return float(scale.scale(torch.ones((), device=device)))
    return check_number(scale, "scale")


# By a function of torch: its module, its operator, and whether output and target must have one shape.
_OPERATORS: dict[Any, tuple[type[nn.Module], str, bool]] = {
    F.cross_entropy: (nn.CrossEntropyLoss, "cross_entropy_loss", False),
    F.nll_loss: (nn.NLLLoss, "nll_loss_nd", False),
    F.mse_loss: (nn.MSELoss, "mse_loss", True),
    F.l1_loss: (nn.L1Loss, "l1_loss", True),
    F.binary_cross_entropy_with_logits: (nn.BCEWithLogitsLoss, "binary_cross_entropy_with_logits", True),
}
_FUNCTIONS = {module: function for function, (module, _, _) in _OPERATORS.items()}


def native_loss(loss: Any) -> tuple[_C.Graph, list[Tensor], bool] | None:
    """Returns what C++ computes in place of a loss of torch, if it can: the graph, its tensors, and whether output and target
    must have one shape."""
    settings = _settings_of(loss)
    function: Any = _FUNCTIONS.get(type(loss), getattr(loss, "func", loss))
    if settings is None or function not in _OPERATORS or not _is_plain(loss):
        return None
    _, operator, one_shape = _OPERATORS[function]
    names = [each.name for each in getattr(torch.ops.aten, operator).default._schema.arguments[2:]]
    if not settings.keys() >= set(names):  # another version of torch
        return None
    if any(settings[name] != default for name, default in _defaults(function).items() if name in settings and name not in names):
        return None
    tensors = [settings[name] for name in ("weight", "pos_weight") if isinstance(settings.get(name), Tensor)]
    args: list[Any] = [{"value": 0}, {"value": 1}]
    for setting in (settings[name] for name in names):
        of_tensor = [number for number, tensor in enumerate(tensors, 2) if tensor is setting]
        if not of_tensor and type(setting) not in (type(None), int, float, str):
            return None
        args.append({"value": of_tensor[0]} if of_tensor else setting)
    args[2 + names.index("reduction")] = get_enum(settings["reduction"])
    return _graph_of(f"aten::{operator}", json.dumps(args), len(tensors)), tensors, one_shape


@lru_cache
def _graph_of(operator: str, args: str, tensors: int) -> _C.Graph:
    result = 2 + tensors
    description = {
        "values": result + 1,
        "inputs": [0, 1],
        "tensors": [[str(number), number] for number in range(2, result)],
        "calls": [{"operator": operator, "args": json.loads(args), "result": result}],
        "outputs": [{"value": result}],
    }
    return _C.Graph(json.dumps(description), None)


def call_loss(loss: Callable[[Any, Any], _Result], output: Any, target: Any) -> _Result:
    """Calls a loss. Its errors tell what an output is that is not a tensor."""
    try:
        return loss(output, target)
    except Exception as error:
        if not isinstance(output, Tensor) and hasattr(error, "add_note"):  # Python 3.10 has no notes
            part = "output['...']" if isinstance(output, Mapping) else "output[0]"
            error.add_note(
                f"[gpipe] the loss gets all that the model returns, here a {type(output).__name__}; take a tensor of it, "
                f"such as lambda output, target: criterion({part}, target)"
            )
        raise


def loss_tensor(loss: Callable[[Any, Any], object], output: Any, target: Any) -> Tensor:
    """Calls a loss. Raises TypeError unless it returns a tensor."""
    value = call_loss(loss, output, target)
    if not isinstance(value, Tensor):
        raise TypeError(f"the loss function returned {shown(value)}; return a tensor, such as a floating-point scalar")
    return value


def _counted(count: Callable[[Any], object], target: Any) -> float | Tensor:
    found = count(target)
    if isinstance(found, Tensor) and found.dim() > 0:
        raise TypeError(f"count returned {shown(found)}; return a number, such as (target != -100).sum()")
    # A number on a device would have to be waited for.
    return found if isinstance(found, Tensor) and not found.is_cpu else check_number(found, "the result of count")


def trains(loss: object) -> bool:
    """Returns whether a loss is a module with parameters that require grad."""
    return isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters())


def _is_plain(loss: Any) -> bool:
    """Returns whether a loss module or function of torch runs only code of torch: no hook, and nothing was replaced."""
    if not isinstance(loss, nn.Module):
        return _is_defined_in(F, loss.func if isinstance(loss, partial) else loss)
    forward = type(loss).forward
    has_hooks = not _C.is_plain(loss) or _has_any_global_hook()  # type: ignore[no-untyped-call]
    if has_hooks or not _is_defined_in(nn.modules.loss, forward):
        return False
    return all(_is_defined_in(F, vars(F)[name]) for name in forward.__code__.co_names if name in vars(F))


def _is_defined_in(module: ModuleType, function: object) -> bool:
    return getattr(function, "__globals__", None) is vars(module)


def _settings_of(loss: Any) -> dict[str, Any] | None:
    if isinstance(loss, nn.Module):
        if type(loss).__module__ != nn.modules.loss.__name__:
            return None
        names = _defaults(_FUNCTIONS[type(loss)]) if type(loss) in _FUNCTIONS else ("reduction", "weight", "ignore_index")
        settings = {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    else:
        has_names = isinstance(loss, partial) and not loss.args
        function, given = (loss.func, loss.keywords) if has_names else (loss, {})
        if vars(F).get(getattr(function, "__name__", "")) is not function:
            return None
        settings = _defaults(function) | given
    is_known = "reduction" in settings and settings.get("size_average") is None and settings.get("reduce") is None
    return settings if is_known else None


@cache
def _defaults(function: Any) -> dict[str, Any]:
    return {name: each.default for name, each in signature(function).parameters.items()}
