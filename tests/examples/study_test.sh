# The ResNet-50 study with tiny images: its files, its errors, and its pictures if matplotlib is installed.
# study_test.sh PROGRAM FOLDER [PYTHON]
program=$1
work=$2
python=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$work"
mkdir -p "$work"
cd "$work"
set -euo pipefail

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

"$program" --quick --batch-size 4 --image 33 --splits 2,3 --output out >log
[[ $(head -1 log) == CPU:* ]] || fail "the hardware is not printed first"
[[ $(head -1 out/runs.csv) == variant,split_size,run,seconds,predicted_seconds ]] || fail "header of runs.csv"
variants=$'data parallel,0\nmodel parallel,0\npipeline,2\npipeline,3\nsingle,0'
[[ $(tail -n +2 out/runs.csv | cut -d, -f1,2 | sort -u) == "$variants" ]] || fail "variants of runs.csv"
[[ $(wc -l <out/runs.csv) == 11 ]] || fail "runs.csv does not have 5 variants with 2 runs each"
[[ $(grep -cE ',[0-9]+\.[0-9]*[1-9][0-9]*,[0-9]+\.[0-9]*[1-9][0-9]*$' out/runs.csv) == 10 ]] || fail "times of runs.csv"
grep -q '^predictions: the middle of 1$' out/hardware.txt || fail "hardware.txt"

refuse() {
  local text=$1
  shift
  if "$program" "$@" >out.log 2>err.log; then fail "$* was accepted"; fi
  grep -qF -- "$text" err.log || { cat err.log >&2; fail "$* does not say '$text'"; }
}
refuse --devices --devices cpu
refuse nonsense --devices cpu,nonsense
refuse "error: --splits: '0' is not a whole number from 1 to 1048576" --splits 0
refuse "error: --runs: '-1' is not a whole number from 1 to 1048576" --runs -1
refuse "error: --image: 'nan' is not a whole number from 1 to 10000" --image nan
refuse 'out/runs.csv is of an earlier study; give --overwrite to replace it' --output out
refuse 'give an even number' --batch-size 5
refuse "--splits has 9, more than the mini-batch's 4 images" --batch-size 4 --splits 2,9
refuse not-a-folder --output out/runs.csv/not-a-folder

if [[ -z $python ]] || ! "$python" -c 'import matplotlib' 2>import.log; then
  echo "matplotlib is not installed: pictures are not tested"
  exit 77
fi
"$python" "$here/../../examples/resnet50_study/plot.py" out >page
for picture in model_parallel all split_size; do
  [[ -s out/$picture.png && -s out/$picture.svg ]] || fail "no $picture"
done
cmp page out/README.md || fail "README.md differs from what was printed"
grep -q '^- Model parallel was .* a single device (predicted: .*; published, on two GPUs: 7 % slower than it)\.$' page ||
  fail "the ratio is not told beside the published one"
head -1 out/runs.csv >none.csv
mkdir none && mv none.csv none/runs.csv && cp out/hardware.txt none
if "$python" "$here/../../examples/resnet50_study/plot.py" none 2>err.log; then fail "a folder without runs is drawn"; fi
grep -q 'has no runs' err.log || { cat err.log >&2; fail "plot.py does not say what is missing"; }
