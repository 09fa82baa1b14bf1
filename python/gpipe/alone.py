"""Measures a model layer by layer: on the ``meta`` device, or larger than a device, which then holds one layer at a time."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import _C
from gpipe.balance import Profile, profile
from gpipe.exported.exporter import mode, unchanged
from gpipe.exported.pretended import pretend, real_like, refuse_loose, shapes_only
from gpipe.skip import Skippable, skippables_in
from gpipe.structure import take_apart
from gpipe.wrapper import layers_in

PARAM_SCALE = 4.0  # of Adam


def profile_one_by_one(
    model: nn.Sequential,
    sample: Any,
    *,
    device: torch.device,
    threads: int,
    seconds: float,
    rank: int = 0,
    ranks: int = 1,
    gather: Callable[[Callable[[], bytes]], list[bytes]] = lambda work: [work()],
) -> Profile | None:
    """Measures a model for about ``seconds``, with random values. Each rank measures the layers whose index is ``rank`` modulo
    ``ranks``, and runs the others for their shapes only, almost without memory. Returns the profile where ``gather`` returns
    what each rank's argument returns, else ``None``.

    Which layers share memory is not known, so bytes are upper bounds: an output is kept for the next layer's backward, and a
    skip in memory of its own for its first reader's."""
    layers = layers_in(model)
    tensors, structure = take_apart(sample)
    value, skips, links = structure.build(map(real_like, tensors)), dict[Any, Any](), dict[Any, dict[str, Any]]()
    outputs, samples = list[int](), len(tensors[0])

    def measure() -> bytes:
        nonlocal value, skips
        mine = []
        for index, (name, layer) in enumerate(layers.items()):
            refuse_loose(layer, name)
            if index % ranks == rank:
                with unchanged(layer.modules()):
                    pretend(layer, most=inf)
                    alone = _Alone(layer, value, skips, samples, device)
                    options: dict[str, Any] = {"device": device, "intraop_threads": threads, "param_scale": PARAM_SCALE}
                    options["seconds"] = seconds * ranks / len(layers)
                    found = profile(nn.Sequential(OrderedDict({name: alone})), alone.sample(index > 0), **options)
                mine.append(json.loads(found.to_json()))
            with unchanged(layer.modules()), mode(layer, True), torch.no_grad(), shapes_only(layer):
                pretend(layer)
                alone = _Alone(layer, value, skips, samples)
                value, left = alone.run(alone.sample(False))
            for key in alone.read:
                links[key]["readers"].append(index)
            for key in [each for each in left if each not in skips]:
                skip = left[key]
                bytes, trains = (0, False) if skip is None else (skip.nbytes, _differentiable(skip))
                link = {"name": key[1], "from": index, "readers": [], "bytes": bytes}
                links[key] = link | {"changed": False, "wants_gradient": trains}
            skips = {key: each for key, each in (skips | left).items() if key not in alone.popped}
            outputs.append(sum(each.nbytes for each in take_apart(value)[0]))
        return json.dumps(mine).encode()

    shares = [json.loads(each) for each in gather(measure)]
    if not shares:
        return None
    whole: dict[str, Any] = shares[0][0] | {"layers": [], "blocks": []}
    whole["skips"] = [each for each in links.values() if each["readers"]]
    for index in range(len(layers)):
        lone = shares[index % ranks][index // ranks]
        whole["layers"].append(lone["layers"][0] | {"output": outputs[index], "shares_with": index})
        for block in lone["blocks"]:
            block |= {"layer": index, "reaches": block["reaches"] + index}
            if block["freed_by"] >= 0:
                block["freed_by"] = index
            elif block["born"] == "F" and block["reaches"] > index and index + 1 < len(layers):
                block |= {"until": "W", "freed_by": index + 1}
                whole["layers"][-1]["saved"] += block["bytes"]
            elif block["born"] != "F" and index > 0:
                block |= {"until": "W" if block["born"] == "I" else "B", "freed_by": index - 1}
            whole["blocks"].append(block)
    for link in whole["skips"]:
        first, readers = link["from"], link["readers"]
        block = {"bytes": link["bytes"], "until": "W", "readers": []}
        whole["blocks"].append(block | {"born": "F", "layer": first, "freed_by": readers[0], "reaches": first, "readers": readers})
        block |= {"layer": readers[-1], "freed_by": first, "reaches": readers[-1]}
        whole["blocks"] += [block | {"born": "B", "until": "B"}, block | {"born": "I"}] if link["wants_gradient"] else []
        if link["wants_gradient"] and len(readers) > 1:
            _add_up(whole["layers"][first], link["bytes"])
    _count_once(whole, list(layers.values()))
    return Profile.from_json(json.dumps(whole))


def _count_once(whole: dict[str, Any], layers: list[nn.Module]) -> None:
    """Counts a tensor of several layers in the first one only. Those with a buffer of another one must be in its stage."""
    ties: dict[Tensor, dict[str, Any]] = {}
    owners: dict[Tensor, int] = {}  # of buffers
    for index, layer in enumerate(layers):
        costs = whole["layers"][index]
        for name, tensor in layer.named_parameters():
            tie = ties.setdefault(tensor, {"name": f"{costs['name']}.{name}", "layers": [], "bytes": tensor.nbytes})
            tie["layers"].append(index)
            if (first := tie["layers"][0]) < index:
                costs["parameters"] -= tensor.nbytes
                for part, times in (("gradients", 1), ("optimizer", PARAM_SCALE - 2)) if tensor.requires_grad else ():
                    costs[part] -= int(times * tensor.nbytes)
                for born in "BI" if tensor.requires_grad else "":  # its gradient until that of the first layer is added
                    block = {"bytes": tensor.nbytes, "born": born, "layer": index, "until": "B", "freed_by": first}
                    whole["blocks"].append(block | {"reaches": index, "readers": []})
                if tensor.requires_grad and len(tie["layers"]) == 2:
                    _add_up(whole["layers"][first], tensor.nbytes)
        for buffer in layer.buffers():
            costs["shares_with"] = min(costs["shares_with"], owners.setdefault(buffer, index))
            costs["buffers"] -= buffer.nbytes if owners[buffer] < index else 0
        costs["late_gradients"] = min(costs["late_gradients"], costs["gradients"])
    whole["ties"] = [tie for tie in ties.values() if len(tie["layers"]) > 1]


def _add_up(layer: dict[str, Any], bytes: int) -> None:
    """Gives a layer's backward the memory in which it adds up gradients of others."""
    for extra in ("backward_extra", "first_backward_extra", "input_gradient_extra"):
        layer[extra] += bytes


def _differentiable(tensor: Tensor | None) -> bool:
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


class _Given(torch.autograd.Function):
    """Returns views of tensors, whose gradients are dropped."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, *tensors: Tensor) -> Any:
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, *(None for _ in gradients))


class _Taken(torch.autograd.Function):
    """Returns a view of the first tensor. The others get gradients of ones."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        ctx.likes = [each.new_empty(()).expand(each.shape) for each in others]
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (*gradients, *(torch.ones_like(each) for each in ctx.likes))


class _End(Skippable):
    """Stashes the skips that a layer reads, or pops what is left of them."""

    def __init__(self, stashes: Iterable[Any], pops: Iterable[Any]) -> None:
        super().__init__()
        self.stashes, self.pops = list(stashes), list(pops)

    def declared(self) -> Any:
        return self.stashes, self.pops, []


class _Alone(nn.Module):
    """A layer as a model of its own, whose input is a list of those tensors of the layer's that have the samples. Has its other
    inputs and the skips that it reads."""

    def __init__(self, layer: nn.Module, input: Any, skips: dict[Any, Any], samples: int, device: Any = "cpu") -> None:
        super().__init__()
        native, self.popped = dict[Any, Any](), set[Any]()
        for _, each in skippables_in(layer, ""):
            for name in sorted(each.stashable_names | each.poppable_names | each.peekable_names):
                key = each.__dict__.get("_namespaces", {}).get(name), name
                native[key] = each.native_key(name)
                self.popped |= {key} if name in each.poppable_names else set()
        self.read = [key for key in native if key in skips]
        self._native, self._left = native, [key for key in native if key not in self.popped]
        tensors, self._structure = take_apart(input)
        self._tensors = [each.detach().to(device) for each in tensors]
        self._skips = [skips[key] if skips[key] is None else skips[key].detach().to(device) for key in self.read]
        self._samples = samples
        self.enter, self.layer = _End([native[key] for key in self.read], []), layer
        self.leave = _End([], [native[key] for key in self._left])

    def _is_batch(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and len(tensor) == self._samples

    def sample(self, trains: bool) -> list[Tensor]:
        """Returns the input, or a tensor that the layer does not use."""
        batch = [each for each in self._tensors if self._is_batch(each)] or [torch.zeros(self._samples, 1)]
        return [each.detach().requires_grad_(trains and _differentiable(each)) for each in batch]

    def run(self, batch: list[Tensor]) -> tuple[Any, dict[Any, Any]]:
        """Returns the layer's output, and the skips that are left after it."""
        parts = iter(batch)
        held = [*self._skips, *(each for each in self._tensors if not self._is_batch(each))]
        held = [each for each in held if _differentiable(each)]
        given = iter(_Given.apply(torch.empty(0, requires_grad=True), *held) if held else ())
        for key, skip in zip(self.read, self._skips):
            _C.stash(self._native[key], next(given) if _differentiable(skip) else skip)
        sources = (parts if self._is_batch(each) else given if _differentiable(each) else iter([each]) for each in self._tensors)
        output = self.layer(self._structure.build(map(next, sources)))
        return output, {key: _C.pop(self._native[key]) for key in self._left}

    def forward(self, batch: list[Tensor]) -> list[Tensor]:
        output, left = self.run(batch)
        tensors = take_apart(output)[0]
        results = [each for each in tensors if self._is_batch(each)]
        others = [each for each in tensors if not self._is_batch(each)]
        others += [skip for key, skip in left.items() if key not in self.read and skip is not None]
        if others := [each for each in others if each.requires_grad]:
            index = next((index for index, each in enumerate(results) if _differentiable(each)), len(results))
            first = results[index] if index < len(results) else torch.zeros(self._samples, 1, device=others[0].device)
            results[index : index + 1] = [_Taken.apply(first, *others)]
        return results
