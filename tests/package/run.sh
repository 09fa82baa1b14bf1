#!/usr/bin/env bash
# Installs a build into a folder, and builds and runs the README's example as a project of its own that finds it there.
# Usage: run.sh CMAKE BUILD_DIR WORK_DIR
set -euo pipefail
cmake=$1 build=$2 work=$3
here=$(cd "$(dirname "$0")" && pwd)

mkdir -p "$work"
sed -n '/^```cpp$/,/^```$/{//!p}' "$here/../../README.md" >"$work/new.cpp"
[[ -s $work/new.cpp ]] || { echo "README.md has no \`\`\`cpp block" >&2 && exit 1; }
cmp -s "$work/new.cpp" "$work/example.cpp" || cp "$work/new.cpp" "$work/example.cpp"

rm -rf "$work/prefix"
"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null
"$cmake" -G Ninja -S "$here" -B "$work/build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DREADME_EXAMPLE="$work/example.cpp" \
  -DCMAKE_PREFIX_PATH="$work/prefix"
"$cmake" --build "$work/build"
"$work/build/user"
