"""Checks that an include goes down only, in the order of folders that docs/design.md lists.

An include of a public header, which is one in the root of gpipe/, counts as an include of all that it includes. Examples
include only headers that are installed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ORDER = re.compile(r"An include goes down only.*?```\n(.*?)```", re.DOTALL)
INCLUDE = re.compile(r'^#include (?:"(\w+/[^"]+)"|<(?:torch|ATen|c10)/)', re.MULTILINE)
NAMED_HEADER = re.compile(r"\w+/[\w/]+\.h")
NAMED = re.compile(r'"(gpipe/\w+/[^"]+\.h)"')


def is_public(path: str) -> bool:
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

    def folder_of(path: str) -> str:
        return max((folder for folder in floors if path.startswith(folder + "/")), key=len, default="")

    def needs(path: str, seen: frozenset[str] = frozenset()) -> set[str]:
        if not is_public(path) or path in seen:
            return {path}
        return {needed for each in includes.get(path, []) for needed in needs(each, seen | {path})}

    errors = []
    for file, paths in includes.items():
        folder = folder_of(file)
        if not folder and not is_public(file):
            errors.append(f"{file}: docs/design.md does not list its folder")
        for path in paths:
            if path.partition("/")[0] in tops and path not in includes:
                errors.append(f'{file} includes "{path}", which does not exist')
            for needed in sorted(needs(path)) if folder else []:
                other = folder_of(needed)
                if other not in ("", folder) and floors[other] >= floors[folder]:
                    through = "" if needed == path else f", which needs {needed}"
                    errors.append(f'{file} includes "{path}"{through}: {other} is not below {folder}')
    used = {path for paths in includes.values() for path in paths}
    unused = [file for file in includes if is_public(file) and file not in used]
    errors += [f"{file} is public, but nothing includes it" for file in unused]
    installed = set(NAMED_HEADER.findall((ROOT / "CMakeLists.txt").read_text()))
    for file, paths in includes.items():
        for path in paths if file.startswith("examples/") else []:
            if path.startswith(("gpipe/", "balance/")) and not is_public(path) and path not in installed:
                errors.append(f'{file} includes "{path}", which is not installed')
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for path in NAMED.findall(page.read_text()):
            errors.append(f'{page.relative_to(ROOT)} names "{path}", but public headers are in the root of gpipe/')
    return errors


if __name__ == "__main__":
    found = check((ROOT / "docs/design.md").read_text())
    sys.exit("\n".join(found) if found else 0)
