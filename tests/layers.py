"""Checks that an include goes down only, in the order of folders that docs/design.md lists.

Public headers, which are those that CMakeLists.txt installs, include only public headers, and nothing of Abseil. One in
the root of gpipe/ belongs to the folder of the source of its name, and its include counts as an include of all that it
includes. Examples include only public headers. Other sources include internals of torch only from one header. Neither modules
nor folders of the Python package import in circles.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ORDER = re.compile(r"An include goes down only.*?```\n(.*?)```", re.DOTALL)
INCLUDE = re.compile(r'^#include (?:"(\w+/[^"]+)"|<(?:torch|ATen|c10)/)', re.MULTILINE)  # "absl/..." is one too
INTERNALS = "gpipe/tensors/torch_internals.h"
INTERNAL = re.compile(r"^#include <((?:torch/csrc/(?!distributed/|api/)|c10/core/impl/)[^>]+)>", re.MULTILINE)
NAMED_HEADER = re.compile(r"\w+/[\w/]+\.h")
NAMED = re.compile(r'"(gpipe/\w+/[^"]+\.h)"')


def is_root(path: str) -> bool:
    return re.fullmatch(r"gpipe/\w+\.h", path) is not None


def check(design: str) -> list[str]:
    order = ORDER.search(design)
    if not order:
        return ["docs/design.md has no list of folders after 'An include goes down only'"]
    floors: dict[str, int] = {}
    for floor, line in enumerate(reversed(order[1].splitlines())):
        floors |= dict.fromkeys(line.partition("  ")[0].split(", "), floor)
    tops = {folder.partition("/")[0] for folder in floors} - {"torch"}
    files = [file for top in tops for suffix in ("h", "cpp") for file in (ROOT / top).rglob(f"*.{suffix}")]
    includes = {
        file.relative_to(ROOT).as_posix(): [path or "torch/" for path in INCLUDE.findall(file.read_text())]
        for file in sorted(files)
    }

    sources = {f"gpipe/{Path(file).stem}.h": file for file in includes if re.fullmatch(r"gpipe/\w+/\w+\.cpp", file)}

    def folder_of(path: str) -> str:
        path = sources.get(path, path)
        return max((folder for folder in floors if path.startswith(folder + "/")), key=len, default="")

    def needs(path: str, seen: frozenset[str] = frozenset()) -> set[str]:
        if not is_root(path) or path in seen:
            return {path}
        return {path}.union(*(needs(each, seen | {path}) for each in includes.get(path, [])))

    errors = []
    for file, paths in includes.items():
        folder = folder_of(file)
        if not folder and not is_root(file):
            errors.append(f"{file}: docs/design.md does not list its folder")
        for path in paths:
            if path.partition("/")[0] in tops and path not in includes:
                errors.append(f'{file} includes "{path}", which does not exist')
            for needed in sorted(needs(path)) if folder and not is_root(file) else []:
                other = folder_of(needed)
                if other not in ("", folder) and floors[other] >= floors[folder]:
                    through = "" if needed == path else f", which needs {needed}"
                    errors.append(f'{file} includes "{path}"{through}: {other} is not below {folder}')
    used = {path for paths in includes.values() for path in paths}
    unused = [file for file in includes if is_root(file) and file not in used]
    errors += [f"{file} is public, but nothing includes it" for file in unused]
    listed = set(NAMED_HEADER.findall((ROOT / "CMakeLists.txt").read_text()))
    public = {file for file in includes if file.endswith(".h") and (is_root(file) or file in listed)}
    public |= {file for file in includes if re.fullmatch(r"(skip|models)/\w+\.h", file)}
    for file, paths in includes.items():
        outside = ("gpipe/", "balance/") if file.startswith("examples/") else ("",) if file in public else ()
        for path in paths:
            if path.startswith(outside) and path not in public | {"torch/"}:
                errors.append(f'{file} includes "{path}", which is not public')
        if re.match(r"(gpipe|skip|balance|models)/", file) and file not in public | {INTERNALS}:
            found = INTERNAL.findall((ROOT / file).read_text())
            errors += [f"{file} includes <{internal}>: write it and its reason into {INTERNALS}" for internal in found]
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for path in NAMED.findall(page.read_text()):
            errors.append(f'{page.relative_to(ROOT)} names "{path}", but public headers are in the root of gpipe/')
    return errors


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))


def circles(root: Path) -> list[str]:
    paths = {".".join(path.relative_to(root).with_suffix("").parts): path for path in root.rglob("*.py")}
    modules = {f"gpipe.{name}".removesuffix(".__init__"): path for name, path in paths.items() if name != "__init__"}
    imports = {name: modules.keys() & set(imported_by(path)) for name, path in modules.items()}
    folders: defaultdict[str, set[str]] = defaultdict(set)
    for name, others in imports.items():
        folder = name.split(".")[1]
        folders[folder] |= {other.split(".")[1] for other in others} - {folder}
    try:
        for graph in (imports, folders):
            TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"imports go in a circle: {error.args[1]}"]
    return []


if __name__ == "__main__":
    found = check((ROOT / "docs/design.md").read_text()) + circles(ROOT / "python/gpipe")
    sys.exit("\n".join(found) if found else 0)
