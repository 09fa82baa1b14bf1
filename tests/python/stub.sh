#!/usr/bin/env bash
# Writes the types of the extension module, as python/gpipe/_C.pyi has them: a line per function or property, without
# documentation, as pybind11 3.0 has them.
#   stub.sh PYTHON FOLDER
# PYTHON imports the installed gpipe, and has pybind11-stubgen. The file is FOLDER/gpipe/_C.pyi.
set -euo pipefail
"$1" -m pybind11_stubgen gpipe._C --output-dir "$2"
documentation=':\n +"""\n[^"]*"""\n'
property='@property\n +def (\w+)\(self\) -> ([^\n]*): \.\.\.'
sed -zEi "s/(def [^\n]*)$documentation/\1: ...\n/g; s/(class [^\n]*)$documentation/\1:\n/g; s/:\n +\.\.\.\n/: ...\n/g
  s/$property/\1: typing.Final[\2]/g; s/ \| typing\.SupportsIndex//g" "$2/gpipe/_C.pyi"
