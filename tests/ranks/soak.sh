#!/bin/bash
# Kills one of three ranks at a random moment, many times: while they train, meet, and gather snapshots. Prints how long the
# others took to end.
#   tests/ranks/soak.sh [build folder] [kills]
set -euo pipefail
build=${1:-build/dev}
kills=${2:-50}
out=$(mktemp)
trap 'rm -f "$out"' EXIT
GPIPE_KILLS=$kills "$build/tests/ranks_tests" --gtest_filter='Ranks*.ARankIsKilled:Ranks*.ARankIsKilledWhileTheyGather' | tee "$out"
sed -n 's/^rank . ended \(.*\) s after rank .:.*/\1/p' "$out" | sort -g |
  awk '{ t[NR] = $1 } END { print NR " ends: median " t[int((NR + 1) / 2)] " s, longest " t[NR] " s" }'
