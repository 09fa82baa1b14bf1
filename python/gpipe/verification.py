"""Compares a pipeline with its layers, run without stages."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe._C import is_recomputing
from gpipe.exported.exporter import unchanged
from gpipe.pipeline import GPipe
from gpipe.randomness import random_scope
from gpipe.structure import take_apart
from gpipe.wrapper import layers_in

_See = Callable[[nn.Module, list[Tensor]], None]  # called with a layer, and the tensors of its output


def verify(pipe: GPipe, input: Any, target: Any, loss: Callable[[Any, Any], Tensor]) -> None:
    """Runs one step of a pipeline, and the same without it: the layers on the calling thread, micro-batch by micro-batch, with
    the same random numbers; then the loss of the joined output and its backward. Arguments as for :meth:`gpipe.GPipe.step`.

        gpipe.verify(pipe, images, labels, nn.functional.cross_entropy)

    Raises AssertionError with the first layer whose output differs. If no output differs, names the loss or the first parameter
    whose gradient does. Says by how much, as a part of the largest element, and names the last that differs. If only gradients
    differ, and the model calls its layers in the order of its parameters, the last is nearest to the fault. Up to the square root
    of the type's precision, 3e-4 for float32, is rounding; float64 tells more. Runs another step in which layers that need no
    Python run without, as in training; they show no outputs. Leaves the model, gradients and random states as they were. Holds
    the outputs of all layers.

    Raises ValueError for a pipeline over ranks.
    """
    if not isinstance(pipe, GPipe):
        raise TypeError(f"pipe must be a gpipe.GPipe, but is {type(pipe)}")
    if pipe.ranks is not None:
        raise ValueError("verify() runs all layers, but a rank has only some; give it a pipeline of the model in one process")
    layers = list(pipe)
    outputs: dict[nn.Module, list[list[Tensor]]] = {layer: [] for layer in layers}
    differences = dict.fromkeys(layers, 0.0)

    def compare(layer: nn.Module, tensors: list[Tensor]) -> None:
        # Any micro-batch: a schedule may run them in another order.
        known = [each for each in outputs[layer] if len(each) == len(tensors)]
        closest = min((max(map(_difference, tensors, each), default=0.0) for each in known), default=inf)
        differences[layer] = max(differences[layer], closest)

    def run(see: _See | None, call: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        for parameter in pipe.module.parameters():
            parameter.grad = None
        with unchanged(pipe.module.modules(), seed), torch.enable_grad(), _seen(layers, see) if see else nullcontext():
            result = call()
        return result.detach(), [parameter.grad for parameter in pipe.module.parameters()]

    def without_stages() -> Tensor:
        result = loss(pipe._leaving(run_layers(layers, pipe._entering(input), pipe.chunks)), target)
        result.backward()  # type: ignore[no-untyped-call]
        return result

    seed = torch.initial_seed()
    kept = [(parameter, parameter.grad) for parameter in pipe.module.parameters()]
    try:
        expected = run(lambda layer, tensors: outputs[layer].append([each.detach().clone() for each in tensors]), without_stages)
        steps = [run(see, lambda: pipe.step(input, target, loss)) for see in (compare, None)]
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
    names = {layer: name for name, layer in layers_in(pipe._sequence).items()}
    found = [(f"the output of layer '{names[layer]}'", difference) for layer, difference in differences.items()]
    for result, gradients in steps:
        found.append(("the loss", _difference(result, expected[0])))
        for (name, _), ours, theirs in zip(pipe.module.named_parameters(), gradients, expected[1], strict=True):
            found.append((f"the gradient of '{name}'", _difference(ours, theirs)))
    wrong = [(what, difference) for what, difference in found if difference > 0]
    if wrong:
        rest = f"; of {len(wrong)} differences, the last is {wrong[-1][0]}" if len(wrong) > 1 else ""
        what, difference = wrong[0]
        text = f"in the pipeline, {what} differs from the result of the layers without stages, by {difference:.2g}{rest}"
        raise AssertionError(text)


def run_layers(layers: Iterable[nn.Module], input: Any, chunks: int) -> Any:
    """Runs layers micro-batch by micro-batch on the calling thread, with the random numbers and result of a pipeline with the same
    default generator. Raises RuntimeError if the last one returned objects of different structure for two micro-batches."""
    inputs, structure = take_apart(input)
    if not inputs:
        raise ValueError("the input holds no tensors; a pipeline needs at least one")
    layers = list(layers)
    trained = (name for layer in layers if layer.training for name, _ in layer.named_buffers())
    least = 2 if any(name.endswith("num_batches_tracked") for name in trained) else 1
    sizes = _C.micro_batch_sizes(len(inputs[0]), chunks, 0, least)
    seed = _C.draw_seed()
    outputs = []
    for micro_batch, parts in enumerate(zip(*(tensor.split_with_sizes(sizes) for tensor in inputs), strict=True)):
        value = structure.build(parts)
        for index, layer in enumerate(layers):
            with random_scope(seed, index, micro_batch):
                value = layer(value)
        outputs.append(take_apart(value))
    first = outputs[0][1]
    if other := next((other for _, other in outputs if other != first), None):
        raise RuntimeError(f"the last layer returned {first!r} for one micro-batch and {other!r} for another; return one structure")
    return first.build(torch.cat(pieces) for pieces in zip(*(tensors for tensors, _ in outputs), strict=True))


@contextmanager
def _seen(layers: list[nn.Module], see: _See) -> Iterator[None]:
    """Calls ``see`` for each output of the layers in a block, except those of recomputes."""

    def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
        if not is_recomputing():
            see(layer, take_apart(output)[0])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(hook))
        yield


def _difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    """Returns how much two tensors differ, as a part of the largest element; 0 for what is rounding."""
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return 0.0 if ours is theirs else inf
    if torch.equal(ours, theirs.to(ours.device)):
        return 0.0
    exact = torch.complex128 if ours.is_complex() else torch.float64
    a, b = (each.detach().to("cpu", exact).nan_to_num(nan=-1e300, posinf=1e301, neginf=-1e301) for each in (ours, theirs))
    difference = float((a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(torch.float64).tiny))
    is_exact = not (ours.is_floating_point() or ours.is_complex())
    return difference if is_exact or difference > sqrt(torch.finfo(ours.dtype).eps) else 0.0
