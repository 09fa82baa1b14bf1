"""Changes the source of the pages before Sphinx reads it. docs/build has drawn the pictures and run Doxygen."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
XML = ROOT / "build/docs/doxygen/xml"


def web_only(app: Any, docname: str, source: list[str]) -> None:
    """Puts in the schedules that only the web pages show."""
    frame = '```{raw} html\n<iframe src="../_static/schedules.html#\\1" title="schedule \\1" class="schedule" loading="lazy"></iframe>\n```'
    source[0] = re.sub(r"<!-- web schedule (.*) -->", frame, source[0])


def side_by_side(app: Any, docname: str, source: list[str]) -> None:
    """Makes tabs of a block in one language that is followed by one in the other."""

    def tabs(found: re.Match[str]) -> str:
        python, cpp = sorted(found.groups(), key=lambda block: block.startswith("```c++"))
        items = "".join(
            f"::::{{tab-item}} {name}\n:sync: {name}\n{block}\n::::\n\n" for name, block in (("Python", python), ("C++", cpp))
        )
        return f":::::{{tab-set}}\n:sync-group: language\n\n{items}:::::\n"

    python, cpp = (rf"```{language}\n(?:(?!```).*\n)*```" for language in ("python", r"c\+\+"))
    for first, second in ((python, cpp), (cpp, python)):
        source[0] = re.sub(rf"^({first})\n\n({second})$", tabs, source[0], flags=re.MULTILINE)


def python_reference(app: Any, docname: str, source: list[str]) -> None:
    """Documents the names in `__all__` of the modules that a block lists, or else what they define."""

    def section(path: str) -> str:
        module = importlib.import_module(path)
        lines = [f"## {path}", "", "```{eval-rst}", f".. automodule:: {path}", "   :no-members:", ""]
        public = [name for name, value in vars(module).items() if name[0] != "_" and getattr(value, "__module__", "") == path]
        for name in getattr(module, "__all__", public):
            value = getattr(module, name)
            if inspect.ismodule(value) or name == "__version__" or (path != "gpipe" and name in sys.modules["gpipe"].__all__):
                continue
            kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
            lines.append(f".. auto{kind}:: {path}.{name}")
            if kind == "class":
                lines += ["   :members:"] + ["   :undoc-members:"] * (value.__module__ == "gpipe._C")
            lines.append("")
        return "\n".join([*lines, "```", ""])

    source[0] = _expand("python-module", section, source[0])


def names_of_headers() -> dict[str, list[tuple[int, str, str]]]:
    """Returns what each header declares, from Doxygen's XML: the line, the kind and the name with its arguments."""
    declared: dict[str, list[tuple[int, str, str]]] = {}
    functions: list[tuple[str, str, ElementTree.Element]] = []

    def add(element: ElementTree.Element, kind: str, name: str) -> None:
        location = element.find("location")
        assert location is not None
        declared.setdefault(location.get("declfile", location.get("file", "")), []).append((int(location.get("line", 0)), kind, name))

    for file in XML.glob("*.xml"):
        compound = ElementTree.parse(file).getroot().find("compounddef")
        if compound is None:
            continue
        kind, scope = compound.get("kind", ""), compound.findtext("compoundname", "")
        if kind in ("class", "struct") and re.fullmatch(r"gpipe::(models::)?\w+", scope):
            add(compound, kind, scope)
        elif kind == "namespace" and scope in ("gpipe", "gpipe::models"):
            for member in compound.iter("memberdef"):
                name = f"{scope}::{member.findtext('name')}"
                if member.get("kind") == "function":
                    functions.append((name, "", member))
                else:
                    add(member, member.get("kind", ""), name)
    count = Counter(name for name, _, _ in functions)
    for name, _, member in functions:
        types = ["".join(each.itertext()) for each in member.findall("param/type")]
        add(member, "function", name if count[name] == 1 else f"{name}({', '.join(types)})")
    return declared


def cpp_reference(app: Any, docname: str, source: list[str]) -> None:
    """Documents everything that the headers of a block declare."""
    declared: dict[str, list[tuple[int, str, str]]] = {}

    def section(header: str) -> str:
        declared.update(declared or names_of_headers())
        items = (f"```{{doxygen{kind}}} {name}\n```\n\n" for _, kind, name in sorted(declared[header]))
        return f"### {header}\n\n" + "".join(items)

    source[0] = _expand("cpp-headers", section, source[0])


def _expand(block: str, section: Callable[[str], str], text: str) -> str:
    """Replaces the words in each such block by sections."""
    pattern = rf"^```\{{{block}\}}\n(.*?)\n```$"
    return re.sub(pattern, lambda found: "\n".join(map(section, found[1].split())), text, flags=re.MULTILINE | re.DOTALL)
