"""Leaves out each wait() and use_on_current_stream() of the library in turn. Some test of pipelines on devices must fail.

    left_out.py BUILD_FOLDER [FIRST [LAST]]

The sources are compiled into a library that is loaded before libgpipe. Calls that no test reaches count for nothing.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALL = re.compile(r"(?<![\w.>:])(?:wait|use_on_current_stream)\((?!const |\w+\._)")
HEAD = """#include <cstdlib>
#include <iostream>
static bool left_out(int call) {
  static const int chosen = std::atoi(std::getenv("LEFT_OUT"));
  if (call != chosen) return false;
  static const bool tells = (std::cout << "reached\\n", true);
  return tells;
}
"""
# Of overwrite(): no test puts back a copy that another stream has made.
UNTESTED = ("use_on_current_stream(from);", "use_on_current_stream(value);")
FOLDERS = ("tensors", "run", "autograd")  # such calls are there and in the wires between devices
FILTER = "Pipeline/OnDevices*:GeneratedOnDevices*:Counts.Copies*:*RanksOnDevices*-*Deadlock*"


def compile_library(build: Path, folder: Path) -> list[str]:
    """Compiles the sources with calls that can be left out. Returns where these are."""
    calls: list[str] = []
    whole = HEAD
    sources = [path for name in FOLDERS for path in sorted((ROOT / "gpipe" / name).glob("*.cpp"))]
    for path in [*sources, ROOT / "gpipe/ranks/device_wire.cpp"]:
        lines = path.read_text().split("\n")
        before = len(calls)
        for number, line in enumerate(lines):
            if line.startswith(" ") and (found := CALL.search(line)):
                calls.append(f"{path.relative_to(ROOT)}:{number + 1}: {line.strip()}")
                lines[number] = f"{line[:found.start()]}if (!left_out({len(calls)})) {line[found.start():]}"
        if len(calls) > before:
            whole += "\n".join(lines)
    (folder / "left_out.cpp").write_text(whole)
    ninja = ["ninja", "-C", build, "-t", "commands", "gpipe/libgpipe.so"]
    commands = subprocess.run(ninja, check=True, capture_output=True, text=True).stdout.splitlines()
    command = next(shlex.split(each) for each in commands if "gpipe_pipeline.dir" in each and ".o -c " in each)
    flags = command[: command.index("-MD")]
    subprocess.run([*flags, "-w", "-shared", "-o", folder / "left_out.so", folder / "left_out.cpp"], check=True, cwd=build)
    return calls


def main(build: str, first: str = "1", last: str = "1000") -> None:
    folder = Path(build).resolve()
    calls = compile_library(folder, folder / "tests/accelerator")
    survivors = []
    for call, place in enumerate(calls, 1):
        if not int(first) <= call <= int(last) or place.endswith(UNTESTED):
            continue
        library = str(folder / "tests/accelerator/left_out.so")
        environment = {**os.environ, "LD_PRELOAD": library, "LEFT_OUT": str(call), "MKL_CBWR": "AUTO,STRICT"}
        tests = [folder / "tests/accelerator/accelerator_tests", "--gtest_fail_fast", f"--gtest_filter={FILTER}"]
        try:
            done = subprocess.run(tests, env=environment, capture_output=True, text=True, errors="replace", timeout=600)
            outcome = "found" if done.returncode else "MISSED" if "reached" in done.stdout else "not reached"
        except subprocess.TimeoutExpired:
            outcome = "found"
        survivors += [place] * (outcome == "MISSED")
        print(f"{outcome}: {place}", flush=True)
    if survivors:
        raise SystemExit(f"{len(survivors)} of {len(calls)} calls can be left out")


if __name__ == "__main__":
    main(*sys.argv[1:])
