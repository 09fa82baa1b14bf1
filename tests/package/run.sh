#!/usr/bin/env bash
# Installs a build into a folder, and builds and runs the program of README.md as a project of its own that finds it there.
# Usage: run.sh CMAKE BUILD_DIR WORK_DIR
set -euo pipefail
cmake=$1 build=$2 work=$3
here=$(cd "$(dirname "$0")" && pwd)

mkdir -p "$work"
cp "$here/CMakeLists.txt" "$work"
sed -n '/^```cpp$/,/^```$/{//!p}' "$here/../../README.md" >"$work/README.cpp"
[[ -s $work/README.cpp ]] || { echo "README.md has no \`\`\`cpp block" >&2 && exit 1; }

rm -rf "$work/prefix"
"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null
"$cmake" --fresh -G Ninja -S "$work" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" \
  -DCMAKE_DISABLE_FIND_PACKAGE_absl=ON
"$cmake" --build "$work/build"
"$work/build/README"
