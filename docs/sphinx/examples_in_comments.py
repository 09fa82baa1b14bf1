"""Doxygen's filter for headers: turns indented lines after an empty line of a comment into a code block. Leaves out
specializations of LibTorch's templates, whose scope Doxygen does not know."""

import re
import sys

INLINE = re.compile(r"/\*.*?\*/")  # would end Doxygen's comment


def filtered(lines: list[str]) -> list[str]:
    result: list[str] = []
    after_empty = False
    code: list[str] = []  # lines of the current block
    for line in [*lines, ""]:
        comment = re.match(r"\s*///(?!/)(.*)", line)
        text = comment[1] if comment else None
        if text is not None and (text.startswith("   ") and (code or after_empty) or code and not text.strip()):
            code.append(line)
            continue
        if code:
            indent = code[0].partition("///")[0]
            language = "cpp" if any(";" in each for each in code) else "unparsed"
            result += [f"{indent}/// @code{{.{language}}}", *(INLINE.sub("", each) for each in code)]
            result.append(f"{indent}/// @endcode")
            code = []
        result.append(line)
        after_empty = text is not None and not text.strip()
    return result[:-1]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as header:
        text = re.sub(r"^template <>\nstruct torch::.*$", "\n", header.read(), flags=re.MULTILINE)
    print("\n".join(filtered(text.split("\n"))), end="")
