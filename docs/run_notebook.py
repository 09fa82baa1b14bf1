"""Runs the code cells of a notebook, without Jupyter.

An output is what a cell prints, or its last expression: as SVG if the value can draw itself, otherwise as text.
"""

from __future__ import annotations

import ast
import contextlib
import io
from typing import Any


def _data(value: object) -> dict[str, list[str]]:
    draw = getattr(value, "_repr_svg_", None)
    svg = {} if draw is None else {"image/svg+xml": draw().splitlines(keepends=True)}
    return {**svg, "text/plain": (f"<{type(value).__name__}>" if svg else repr(value)).splitlines(keepends=True)}


def run_cell(source: str, names: dict[str, Any], title: str, count: int) -> list[dict[str, Any]]:
    """Runs the source of a cell in a namespace. Returns its outputs, in the notebook's format."""
    statements = ast.parse(source).body
    last = statements.pop() if statements and isinstance(statements[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), title, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), title, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = _data(value)
        outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs


def run(notebook: dict[str, Any], title: str) -> None:
    """Runs a notebook's code cells in order, and replaces their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
            cell["outputs"] = run_cell("".join(cell["source"]), names, f"{title}, cell {count}", count)
