# Sourced by the tests of tools, which get PROGRAM FOLDER. Empties the folder and changes into it. The tests call:
#   fail TEXT...          ends the test
#   refuse TEXT FLAG...   the program must fail with an error that contains TEXT, and leaves it in err.log
set -euo pipefail
program=$1
work=$2
rm -rf "$work"
mkdir -p "$work"
cd "$work"

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

refuse() {
  local text=$1
  shift
  if "$program" "$@" >out.log 2>err.log; then fail "$* was accepted"; fi
  grep -qF -- "$text" err.log || { cat err.log >&2; fail "$* does not say '$text'"; }
}
