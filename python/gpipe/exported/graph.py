"""A model as a list of operations. What the rest of this folder reads and changes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.utils._pytree import TreeSpec, tree_leaves

from gpipe.exported.exporter import innermost_line
from gpipe.exported.sizes import Sizes


@dataclass(eq=False)
class Value:
    """What an operation computes, or what a model gets or owns."""

    example: Any  # a fake tensor, or a symbolic number
    shape: tuple[Any, ...] = ()  # of a tensor: integers and expressions; None for what an operator in place changes
    tensor: str = ""  # the name of the model's parameter, buffer or constant that it is
    is_parameter: bool = False

    @property
    def is_number(self) -> bool:
        return isinstance(self.example, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


@dataclass(frozen=True)
class Number:
    """A number that depends on the inputs' sizes: an expression of sympy. Later, its description, in which a ``Size`` stands
    for a part."""

    expression: Any


class Call(NamedTuple):
    """One call of a module: a key that no other call has, and the module's path."""

    key: str
    path: str


class Context(NamedTuple):
    """A grad mode or an autocast around operations."""

    key: str  # that no other has
    settings: dict[str, Any]  # as ``gpipe::Graph`` describes them


@dataclass(eq=False)
class Operation:
    """One call of a function. Its arguments hold values, numbers and constants."""

    result: Value
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Call
    contexts: tuple[Context, ...] = ()
    line: str = ""  # of the model's code

    def inputs(self) -> Iterator[Value]:
        return inputs_of((self.args, self.kwargs))

    @property
    def schema(self) -> torch.FunctionSchema | None:
        """What an operator of torch declares. Other functions have no schema."""
        return self.function._schema if isinstance(self.function, torch._ops.OpOverload) else None

    def given(self) -> Iterator[tuple[Any, Any]]:
        """Yields the arguments that the schema declares and that have a value, each with its value."""
        declared = self.schema.arguments if self.schema else ()
        yield from zip(declared, self.args)
        yield from ((each, self.kwargs[each.name]) for each in declared if each.name in self.kwargs)


@dataclass(eq=False)
class Graph:
    """The operations of a model in one mode, in order of execution. ``inputs`` and ``outputs`` are flattened, with ``None``
    for what is not a tensor."""

    inputs: list[Value | None]
    in_spec: TreeSpec
    outputs: list[Any]
    out_spec: TreeSpec
    tensors: dict[str, Value]  # parameters, buffers and constants, by name
    sizes: Sizes
    operations: list[Operation] = field(default_factory=list)


def inputs_of(arguments: Any) -> Iterator[Value]:
    return (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Value))


def name_of(constant: object) -> str:
    """Returns the name of a dtype, a layout or a memory format of torch."""
    return str(constant).removeprefix("torch.")


# Checks that an export adds: of its own devices and types, and that numbers which it cannot know may be sizes. Checks of
# sizes alone are guards.
_CHECKS = re.compile(r"aten::(_assert_tensor_metadata|sym_constrain_range)")
_OF_SIZES = re.compile(r"expression (u\d+ >= 0|((?!\bu\d).)*) on node")


class Reader:
    """Reads the graph of an exported program. ``names`` are the names that its tensors get, one for a tied tensor. Raises
    ValueError for control flow that depends on data."""

    def __init__(self, program: ExportedProgram, names: Mapping[str, str]) -> None:
        signature = program.graph_signature
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        call = program.call_spec
        assert call.in_spec is not None and call.out_spec is not None
        sizes = Sizes()
        self.graph = Graph([], call.in_spec, [], call.out_spec, {}, sizes)
        self._values: dict[fx.Node, Any] = {}
        for node in program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            value = self._value(node)
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(spec.arg, TensorArgument):
                    sizes.add(value, node.name)
                self.graph.inputs.append(value if isinstance(spec.arg, TensorArgument) else None)
                if isinstance(spec.arg, ConstantArgument):
                    self._values[node] = spec.arg.value
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                assert spec.target is not None
                value.tensor, value.is_parameter = names[spec.target], spec.kind is InputKind.PARAMETER
                self._values[node] = self.graph.tensors.setdefault(value.tensor, value)
            else:
                raise ValueError(f"cannot convert the model: it holds an object that is not a tensor: '{spec.target}'")
        sizes.add_guards()
        outputs = self._read(program.graph_module, ())
        self.graph.outputs = [
            spec.arg.value if isinstance(spec.arg, ConstantArgument) else output
            for spec, output in zip(signature.output_specs, outputs, strict=True)
        ]
        self.graph.operations = self._used()
        if not self.graph.operations:
            raise ValueError("cannot convert the model: it computes nothing; return tensors that depend on the input")

    def _used(self) -> list[Operation]:
        """Returns the operations without those that compute numbers for checks only, which are not read."""
        found: list[Operation] = []
        needed = set(inputs_of(self.graph.outputs))
        for operation in reversed(self.graph.operations):
            if operation.result in needed or not operation.result.is_number:
                needed.update(operation.inputs())
                found.append(operation)
        return found[::-1]

    def _value(self, node: fx.Node) -> Value:
        example = node.meta.get("val")
        shape = tuple(map(self.graph.sizes.named, example.shape)) if isinstance(example, Tensor) else ()
        value = self._values[node] = Value(example, shape)
        return value

    def _read(self, module: fx.GraphModule, contexts: tuple[Context, ...]) -> Any:
        """Adds the operations of a module. Returns the module's outputs."""
        for node in module.graph.nodes:
            if node.op == "output":
                return self._arguments(node.args[0])
            if node.op != "call_function":
                continue
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                self._read_nested(module, node, contexts)
            elif node.target is operator.getitem and isinstance(of := self._arguments(node.args[0]), (list, tuple)):
                self._values[node] = of[node.args[1]]  # an output of a nested module
            elif self.graph.sizes.knows(number := node.meta.get("val")) and not self._is_of_data(node):
                named = self.graph.sizes.named(number)
                self._values[node] = named if isinstance(named, int) else Number(named)
            elif not self._is_own_check(node):
                args, kwargs = self._arguments((node.args, node.kwargs))
                place = _innermost(node), contexts, innermost_line(node.meta.get("stack_trace") or "")
                self.graph.operations.append(Operation(self._value(node), node.target, tuple(args), dict(kwargs), *place))
        raise AssertionError("a graph without output")

    def _is_of_data(self, node: fx.Node) -> bool:
        """Returns whether a number depends on data, maybe one that the model's checks leave a single value."""
        given = [self._values.get(each) for each in node.all_input_nodes]
        is_read = torch.Tag.data_dependent_output in getattr(node.target, "tags", ())
        return is_read or any(isinstance(each, Value) and each.is_number for each in given)

    @staticmethod
    def _is_own_check(node: fx.Node) -> bool:
        """Returns whether a node is a check that is not needed. Layers make the other checks: the model's, and the operators'."""
        name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
        if name == "aten::_assert_scalar":
            return _OF_SIZES.search(str(node.args[1])) is not None
        return _CHECKS.match(name) is not None

    def _read_nested(self, module: fx.GraphModule, node: fx.Node, contexts: tuple[Context, ...]) -> None:
        """Adds the operations under ``torch.no_grad`` or ``torch.autocast``."""
        name, given = str(node.target), list(node.args)
        if name == "wrap_with_set_grad_enabled":
            context, args = Context(node.name, {"grad": given[0]}), given[1:]
        elif name == "wrap_with_autocast":
            _, dtype, enabled, cache = given[:4]
            settings = {"autocast": dtype and name_of(dtype), "enabled": enabled, "cache": cache}
            context, args = Context(node.name, settings), given[4:]
        else:
            raise ValueError(
                f"cannot convert the model: it uses torch's operator '{name}', for control flow or a function called whole"
            )
        body: Any
        body, *args = args
        inner = getattr(module, body.target)
        for placeholder, arg in zip(inner.graph.find_nodes(op="placeholder"), args, strict=True):
            self._values[placeholder] = self._arguments(arg)
        self._values[node] = self._read(inner, (*contexts, context))

    def _arguments(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: self._values[node])


def _innermost(node: fx.Node) -> Call:
    """Returns the innermost call of a module that a node belongs to."""
    call = Call("", "")
    for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
        # torch.export adds some operations itself, with a name of its own.
        if not path.startswith("_empty_nn_module_stack"):
            call = Call(key, path.partition("@")[0])
    return call
