"""The sizes of a model's inputs as symbols of sympy, which are the same in each program of the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Size(NamedTuple):
    """The size of a value in a dimension, divided by a number."""

    value: Any
    dimension: int
    divisor: int = 1


class Sizes:
    """The sizes of the inputs of an exported program."""

    def __init__(self) -> None:
        self.places: dict[Any, Size] = {}  # of each symbol
        self.guards: dict[Any, bool] = {}  # by expression: whether only torch asked for it
        self._names: dict[Any, Any] = {}  # of the program's symbols
        self._environment: Any = None

    def add(self, value: Any, name: str) -> None:
        """Adds the next input, and sets its shape."""
        import sympy  # type: ignore[import-untyped]  # takes a second, so only here

        def place(dimension: int, divisor: int = 1) -> Any:
            """Returns the symbol for a size. All inputs have the same number of samples."""
            text = f"{name}.shape[{dimension}]" if dimension > 0 else "samples"
            text = text if divisor == 1 else f"({text} // {divisor})"
            symbol = sympy.Symbol(text, integer=True, positive=True)
            self.places.setdefault(symbol, Size(value, dimension, divisor))
            return symbol

        for dimension, size in enumerate(value.example.shape):
            if (expression := expression_of(size)) is None or expression.is_Integer:
                continue
            own = place(dimension)
            factor, symbol = expression.as_coeff_Mul()
            if symbol.is_Symbol and symbol not in self._names:
                self._names[symbol] = part = place(dimension, int(factor))
                if factor != 1:
                    self._require(sympy.Eq(sympy.Mod(own, factor), 0))
                bounds = size.node.shape_env.var_to_range[symbol]
                self._require(sympy.Ge(part, bounds.lower), bounds.lower == 2)  # 2 is torch's own
                if bounds.upper < sys.maxsize:
                    self._require(sympy.Le(part, bounds.upper))
            else:
                self._require(sympy.Eq(own, self.named(size)))
            self._environment = size.node.shape_env
        value.shape = tuple(map(self.named, value.example.shape))

    def _require(self, expression: Any, is_of_torch: bool = False) -> None:
        if expression != True:  # noqa: E712, an expression
            self.guards[expression] = self.guards.get(expression, True) and is_of_torch

    def merge(self, other: Sizes, same: Mapping[Any, Any]) -> None:
        """Adds what another mode requires of the same sizes. ``same`` has the inputs of this mode by those of the other."""
        for symbol, size in other.places.items():
            self.places.setdefault(symbol, size._replace(value=same[size.value]))
        for guard in other.guards.items():
            self._require(*guard)

    def add_guards(self) -> None:
        """Adds what the export took for granted about the sizes."""
        for guard in self._environment.guards if self._environment else ():
            self._require(self._environment.replace(guard.expr).xreplace(self._names), _is_of_operator(guard))

    def with_one_sample(self) -> Sizes:
        """Returns these sizes with guards that let one sample through if they exclude it because torch does: the shapes that an
        export computes are strict, and tell strides of one sample from those of more."""
        import sympy

        symbol = next(each for each, size in self.places.items() if size.dimension == 0)

        def may_break(guard: Any) -> bool:
            try:
                return self.guards[guard] and guard.free_symbols == {symbol} and guard.subs(symbol, 1) != True  # noqa: E712
            except (AssertionError, ZeroDivisionError):  # functions of torch take no negative numbers
                return True

        found = copy(self)
        found.guards = {sympy.Or(sympy.Eq(symbol, 1), guard) if may_break(guard) else guard: False for guard in self.guards}
        return found

    def knows(self, number: Any) -> bool:
        """Returns whether a symbolic number depends on these sizes only."""
        expression = expression_of(number)
        return expression is not None and expression.free_symbols <= self._names.keys()

    def named(self, number: Any) -> Any:
        """Returns a symbolic number as an expression of the inputs' sizes; any other number as it is."""
        expression = expression_of(number)
        if expression is None:
            return number
        return int(expression) if expression.is_Integer else expression.xreplace(self._names)


def expression_of(number: Any) -> Any:
    """Returns the expression of a symbolic number, and ``None`` for anything else."""
    return number.node.expr if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None


def text_of(expression: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    text: str = PythonPrinter().doprint(expression)
    return text


def described(expression: Any, size: Callable[[Any], Any]) -> Any:
    """Returns an expression as a number in the description of a graph. ``size`` returns the number for a part of it, or
    ``None``; it finds all symbols. Raises ValueError for functions that a description lacks."""
    if (found := size(expression)) is not None:
        return found
    if expression.is_Boolean and not expression.args:
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Float:
        return float(expression)
    name = type(expression).__name__
    if name in ("Mul", "Rational", "Half", "Pow") and (parts := expression.as_numer_denom())[1] != 1:
        return ["//" if expression.is_integer else "/", *(described(part, size) for part in parts)]
    args = [described(arg, size) for arg in expression.args]
    if name in ("StrictGreaterThan", "GreaterThan"):
        return ["<" if name == "StrictGreaterThan" else "<=", *args[::-1]]
    if name == "Abs":
        return ["max", *args, ["*", *args, -1]]
    if name == "Not":
        return ["==", *args, 0]
    if name in ("Pow", "PowByNatural") and isinstance(args[1], int) and args[1] > 0:
        return ["*", *args[:1] * args[1]]
    if name not in _RULES:
        raise ValueError(f"cannot convert the model: its sizes depend on {expression}")
    return [_RULES[name], *args]


_NAMES = {  # of sympy's and torch's functions, by ours
    "+": "Add",
    "*": "Mul",
    "//": "FloorDiv CleanDiv",
    "%": "Mod PythonMod",
    "/": "IntTrueDiv FloatTrueDiv",
    "**": "Pow FloatPow PowByNatural",
    "min": "Min",
    "max": "Max",
    "float": "ToFloat",
    "trunc": "TruncToInt TruncToFloat",
    "ceil": "CeilToInt ceiling",
    "floor": "FloorToInt floor",
    "round": "RoundToInt",
    "sqrt": "OpaqueUnaryFn_sqrt",
    "exp": "OpaqueUnaryFn_exp exp",
    "log": "OpaqueUnaryFn_log log",
    "<": "StrictLessThan",
    "<=": "LessThan",
    "==": "Equality",
    "!=": "Unequality",
    "and": "And",
    "or": "Or",
}
_RULES = {name: ours for ours, names in _NAMES.items() for name in names.split()}


def _is_of_operator(guard: Any) -> bool:
    """Returns whether code of torch, not of the model, has added a guard. Of modules and functions, a model may choose."""
    frame = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    place = Path(getattr(frame, "filename", ""))
    return place.is_relative_to(_TORCH) and not place.is_relative_to(_TORCH / "nn")


_TORCH = Path(torch.__file__).parent
