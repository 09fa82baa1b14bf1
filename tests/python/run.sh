#!/usr/bin/env bash
# Installs the package with the libraries of a build folder into a new virtual environment. Checks types and stubs there.
#   run.sh CMAKE BUILD_FOLDER WORK_FOLDER PYTHON
# PYTHON has torch and the other packages that the tests need. The new environment can import them. To run tests there, in
# this folder:
#   GPIPE_BUILD_DIR=BUILD_FOLDER WORK_FOLDER/venv/bin/python -m pytest test_step.py
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cmake=$1 build=$2 work=$3 python=$4

"$python" -c 'import mypy, pybind11_stubgen, pytest, scikit_build_core' || exit 77
rm -rf "$work"
mkdir -p "$work/source"
cp -r "$root"/{pyproject.toml,CMakeLists.txt,README.md,LICENSE,python} "$work/source"
"$cmake" --install "$build" --component python --prefix "$work/source/python" >/dev/null

packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -m venv --without-pip "$work/venv"
venv=$work/venv/bin/python
"$python" -c "$packages" >"$("$venv" -c "$packages")/borrowed.pth"
"$python" -m pip --python "$venv" install --quiet --no-build-isolation --no-deps --no-index --disable-pip-version-check \
  --config-settings=wheel.cmake=false "$work/source"

# The cache lasts, because the types of torch take 20 seconds.
mypy() { "$venv" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$work.mypy" "$@"; }
(cd "$root/examples/python" && mypy unet_train.py diffusion.py attention_residuals.py)
cd "$root/tests/python" # no folder here shadows the installed gpipe
# A line per function or property, without documentation, as pybind11 3.0 has them. A checkpoint mode is one of three texts.
"$venv" -m pybind11_stubgen gpipe._C --output-dir "$work/stubs"
documentation=':\n +"""\n[^"]*"""\n'
modes='typing.Literal["always", "except_last", "never"]'
property='@property\n +def (\w+)\(self\) -> ([^\n]*): \.\.\.'
sed -zEi "s/(def [^\n]*)$documentation/\1: ...\n/g; s/(class [^\n]*)$documentation/\1:\n/g; s/:\n +\.\.\.\n/: ...\n/g
  s/$property/\1: typing.Final[\2]/g; s/( checkpoint: typing\.Final\[)str/\1$modes/
  s/ \| typing\.SupportsIndex//g" "$work/stubs/gpipe/_C.pyi"
# The package has the lines about public classes. Its own code is checked with all.
whole=$work/stubs/gpipe/_C.pyi package=$("$venv" -c "$packages")/gpipe
if grep -vxFf "$whole" "$package/_C.pyi" | grep -v '^#\|^def __getattr__'; then exit 1; fi
mypy typed_program.py
cp "$whole" "$package/_C.pyi"
mypy --package gpipe
