# The ResNet-50 study with tiny images: its files, its errors, the same in four processes, and its pictures if matplotlib is
# installed.
# study_test.sh PROGRAM FOLDER PYTHON
here=$(cd "$(dirname "$0")" && pwd)
source "$here/program.sh"

tiny=(--quick --batch-size 2 --image 33 --splits 1)
"$program" "${tiny[@]}" --output out >log
[[ $(head -1 log) == CPU:* ]] || fail "the hardware is not printed first"
[[ $(head -1 out/runs.csv) == variant,split_size,run,seconds,predicted_seconds ]] || fail "header of runs.csv"
variants=$'data parallel,0\nmodel parallel,0\npipeline,1\nsingle,0'
[[ $(tail -n +2 out/runs.csv | cut -d, -f1,2 | sort -u) == "$variants" ]] || fail "variants of runs.csv"
[[ $(wc -l <out/runs.csv) == 9 ]] || fail "runs.csv does not have 4 variants with 2 runs each"
[[ $(grep -cE ',[0-9]+\.[0-9]*[1-9][0-9]*,[0-9]+\.[0-9]*[1-9][0-9]*$' out/runs.csv) == 8 ]] || fail "times of runs.csv"
grep -q '^profiles per variant: 1; the median prediction is used$' out/hardware.txt || fail "hardware.txt"

refuse devices --devices --devices cpu
rarely refuse nonsense nonsense --devices cpu,nonsense
refuse splits --splits --splits 0
rarely refuse runs --runs --runs -1
rarely refuse image --image --image nan
refuse out 'out/runs.csv exists from an earlier study; give --overwrite to replace it'
refuse odd 'two replicas split it equally; give an even number' --batch-size 5
refuse few "--splits contains 9, which is more than the mini-batch's 4 images" --batch-size 4 --splits 2,9
rarely refuse log '[log]' # not a folder

# In four processes. ./test has only the files that they would write.
mkdir out/processes
{ cat out/runs.csv && sed -n 's/^pipeline,/data × pipeline,/p' out/runs.csv; } >out/processes/runs.csv
{ cat out/hardware.txt && echo 'processes: 4'; } >out/processes/hardware.txt
four_processes() {
  (torchrun 2 --quick --output two) >err.log 2>&1 && fail "two processes were accepted"
  grep -qF 'there are 2 processes; start one, or four' err.log || { cat err.log >&2; fail "two processes are not told"; }
  (torchrun 4 "${tiny[@]}" --output out/processes --overwrite) >log 2>&1 ||
    { cat log >&2; fail "four processes"; }
  variants+=$'\ndata parallel over processes,0\ndata × pipeline,1'
  [[ $(tail -n +2 out/processes/runs.csv | cut -d, -f1,2 | LC_ALL=C sort -u) == "$(LC_ALL=C sort <<<"$variants")" ]] ||
    fail "variants of four processes"
  [[ $(grep -cE ',[0-9]+\.[0-9]*[1-9][0-9]*,[0-9]+\.[0-9]*[1-9][0-9]*$' out/processes/runs.csv) == 12 ]] ||
    fail "times of four processes"
  grep -q '^processes: 4$' out/processes/hardware.txt || fail "hardware.txt of four processes"
  [[ ! -e out/processes/store ]] || fail "the processes leave a file"
}
rarely four_processes
refuse out/processes 'out/processes/runs.csv exists from an earlier study'
if ! "$python" -c 'import matplotlib' 2>import.log; then
  echo "matplotlib is not installed: pictures are not tested"
  exit 77
fi
"$python" "$here/../../bench/resnet50_study/plot.py" out >page
for picture in all processes/all; do [[ -s out/$picture.png ]] || fail "no $picture.png"; done
grep -q '^| data × pipeline, split 1 | [0-9.]* | [0-9.]* | [0-9.]* |$' page || fail "no table of four processes"
cmp page out/README.md || fail "README.md differs from what was printed"
# Two runs support no percentage.
grep -qx -- '- Model parallel was neither clearly faster nor clearly slower than a single device (published, on two GPUs: 7 % slower)\.' page ||
  fail "a percentage from two runs, or no published result"
! grep -E '^- The pipeline with split size 1 was .*%' page || fail "a percentage from two runs"

mkdir steady && cp out/hardware.txt steady
{
  head -1 out/runs.csv
  for run in 1 2 3; do
    echo "single,0,$run,10.$run,10"
    echo "model parallel,0,$run,10.$((4 - run)),10"
    echo "pipeline,20,$run,5.$run,4"
    echo "data × pipeline,20,$run,5.$run,4"
    echo "pipeline,12,$run,$((run * run)),4"
  done
} >steady/runs.csv
"$python" "$here/../../bench/resnet50_study/plot.py" steady >page
grep -qx -- '- Model parallel was neither clearly faster .*' page || fail "equal means give a percentage"
grep -qx -- '- The pipeline with split size 20 was 96 % faster than a single device (predicted: 150 % faster; published, on two GPUs: 49 % faster)\.' page ||
  fail "the percentages of steady runs"
grep -qx -- '- Data × pipeline with split size 20 was 96 % faster than a single device (predicted: 150 % faster)\.' page ||
  fail "replicas of pipelines are not compared"
grep -qx -- '- The pipeline with split size 12 was neither clearly faster .*' page || fail "noise gives a percentage"
head -1 out/runs.csv >none.csv
mkdir none && mv none.csv none/runs.csv && cp out/hardware.txt none
if "$python" "$here/../../bench/resnet50_study/plot.py" none 2>err.log; then fail "a folder without runs was accepted"; fi
grep -q 'has no runs' err.log || { cat err.log >&2; fail "plot.py does not report missing runs"; }
