"""Writes a converted model as a file that C++ reads and trains. gpipe/model.h describes the file."""

import json
import os
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from gpipe import _C
from gpipe.exported.layer import ExportedLayer
from gpipe.wrapper import ConvertedSequence, layers_in


def export_model(sequence: nn.Sequential, path: str | os.PathLike[str]) -> None:
    """Writes a model of ``gpipe.to_sequential(..., native=True)`` as a file that the C++ function ``gpipe::load_model`` reads.
    Raises TypeError for another model; ValueError, with names, if a layer calls Python functions, or if different parameters
    share memory; and OSError."""
    if not isinstance(sequence, ConvertedSequence):
        raise TypeError(f"sequence must be a model of gpipe.to_sequential, but is {type(sequence).__name__}")
    tensors: dict[str, Tensor] = {}
    state = sequence.state_dict(keep_vars=True)
    layers = []
    first_names: dict[int, str] = {}  # of tensors, by id
    for key, layer in layers_in(sequence).items():
        if not isinstance(layer, ExportedLayer):
            raise TypeError(f"layer '{key}' is a {type(layer).__name__}; add it to the module before the conversion")
        if layer.python_functions:
            calls = ", ".join(layer.python_functions)
            advice = "convert with native=True, whose report() tells what cannot be exported"
            raise ValueError(f"layer '{layer.name}' calls {calls}, which C++ cannot run; {advice}")
        listed: list[Any] = []
        of_layer = *layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)
        for name, tensor in ((name.removeprefix("model."), tensor) for name, tensor in of_layer):
            in_file = name if name in state else f".{name}"
            kind = "buffer" if not isinstance(tensor, nn.Parameter) else "parameter" if tensor.requires_grad else "frozen"
            listed.append([in_file, kind, first_names.get(id(tensor))])
            first_names.setdefault(id(tensor), in_file)
            tensors[in_file] = tensor
        for name, tensor in state.items():
            if first_names.get(id(tensor), name) != name and name not in tensors and any(tensor is each for _, each in of_layer):
                listed.append([name, "parameter" if tensor.requires_grad else "frozen", first_names[id(tensor)]])
                tensors[name] = tensor
        layers.append({"name": key, "tensors": listed, "graph": json.loads(layer.description)})
    places = {id(each): (each.data_ptr(), each.nbytes, name) for name, each in tensors.items() if isinstance(each, nn.Parameter)}
    for (begin, size, name), (after, _, other) in pairwise(sorted(places.values())):
        if after < begin + size:
            raise ValueError(f"the parameters '{name}' and '{other}' share memory, which a file loses; use one parameter")
    _C.write_weights(os.fsencode(path), tensors, json.dumps({"version": 1, "layers": layers}))
