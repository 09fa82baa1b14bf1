#!/usr/bin/env bash
# Kills random ranks of trainings, which must come back and end as if nothing had happened. Prints each round.
#   recovery_soak.sh [KILLS (default 50) [BUILD_FOLDER (default build/dev) [PYTHON (default .venv/bin/python)]]]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
kills=${1:-50}
program=$(realpath "${2:-$root/build/dev}")/examples/unet/unet_train
python=${3:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bash "$root/tests/examples/recovery_test.sh" "$program" "$work/run" "$python" "$kills"
