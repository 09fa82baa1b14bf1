"""Doxygen's filter of a header: in its comments, lines that are indented after an empty one become a block of code."""

import re
import sys

INLINE = re.compile(r"/\*.*?\*/")  # within a comment it would end Doxygen's


def filtered(lines: list[str]) -> list[str]:
    result: list[str] = []
    indent = ""
    in_code = after_empty = False
    for line in lines:
        comment = re.match(r"(\s*)///(?!/)(.*)", line)
        text = comment[2] if comment else None
        if comment:
            indent = comment[1]
        if in_code and (text is None or text.strip() and not text.startswith("   ")):
            result.append(f"{indent}/// @endcode")
            in_code = False
        if not in_code and after_empty and text is not None and text.startswith("   "):
            result.append(f"{indent}/// @code{{.cpp}}")
            in_code = True
        result.append(INLINE.sub("", line) if in_code else line)
        after_empty = text is not None and not text.strip()
    return result


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as header:
        print("\n".join(filtered(header.read().split("\n"))), end="")
