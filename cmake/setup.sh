# Sourced in the repository's root by ./demo, ./test, tests/long and python/build_wheel. Installs what they need on Debian
# 12 and Ubuntu 24.04. Starts no package manager when nothing is missing.
#
#   GPIPE_PYTHON       Python interpreter that has torch. Default: that of .venv, into which torch is installed.
#   GPIPE_TORCH        version of torch to install, such as 2.12. Default: the newest that is tested.
#   GPIPE_TORCH_INDEX  another index that pip looks for torch in. One of torch without CUDA saves most of the 5 GB.

readonly build_packages=(cmake g++ libabsl-dev libcli11-dev libgraphicsmagick++1-dev
  ninja-build nlohmann-json3-dev pkgconf python3-venv zlib1g-dev)
readonly test_packages=("${build_packages[@]}" clang libclang-rt-dev libgmock-dev python3-dev)
read -ra torch_versions < <(sed -n 's/^set(GPIPE_TORCH_TESTED \(.*\))$/\1/p' cmake/GpipeTorch.cmake)
readonly torch=torch==${GPIPE_TORCH:-${torch_versions[-1]}}.*
readonly test_python_packages=("$torch" torchvision clang-format==14.0.6 tensorboard==2.21.0
  matplotlib==3.11.2 numpy scikit-build-core==1.1.2 pytest==9.2.0 mypy==2.4.1 pybind11-stubgen==3.0.0
  timm==1.0.31 transformers==5.23.0 accelerate==1.15.0 lightning-fabric==2.6.6 diffusers==0.42.1 monai==1.6.1
  einops==0.8.2 safetensors==0.8.0 segmentation-models-pytorch==0.6.0)
readonly log=build/setup.log

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# Runs a command and appends its output to the log.
quietly() { "$@" >>"$log" 2>&1 </dev/null; }

# install_packages PACKAGE...: the missing ones of these Debian packages.
install_packages() {
  command -v dpkg-query >/dev/null || return 0 # not Debian: CMake reports what it does not find
  local missing=()
  mapfile -t missing < <(
    dpkg-query --show --showformat='${Package} ${db:Status-Status}\n' "$@" 2>/dev/null |
      awk '$2 == "installed" {print $1}' | sort | comm -13 - <(printf '%s\n' "$@" | sort))
  ((${#missing[@]})) || return 0

  local as_root=()
  if ((EUID != 0)); then
    sudo -v 2>/dev/null || fail "these packages are missing: ${missing[*]}. Install them, or run this as root or with sudo."
    as_root=(sudo)
  fi
  echo "Installing packages: ${missing[*]}"
  quietly "${as_root[@]}" apt-get update || true # the packages may come from the mirrors that do answer
  quietly "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}" ||
    fail "could not install the packages ${missing[*]} (see $log; is there a network?)"
}

# install_python PACKAGE...: these packages into .venv, and GPIPE_PYTHON its interpreter, unless GPIPE_PYTHON is set.
install_python() {
  if [[ -n ${GPIPE_PYTHON:-} ]]; then
    "$GPIPE_PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null ||
      fail "GPIPE_PYTHON=$GPIPE_PYTHON is not a Python interpreter that has torch"
    return
  fi
  GPIPE_PYTHON=$PWD/.venv/bin/python
  local package missing=()
  for package; do # a file for each package, made when pip has succeeded
    [[ -e .venv/installed/$package ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  local python=/usr/bin/python3 # the one that python3-venv belongs to
  [[ -x $python ]] || python=python3
  # Packages for different versions of CUDA overwrite each other's files.
  [[ ! -d .venv/installed || -e .venv/installed/$torch ]] || rm -rf .venv
  echo "Installing ${missing[*]} into .venv (5 GB on disk with torch's CUDA libraries)"
  quietly "$python" -m venv .venv || fail "could not create .venv with $python (see $log)"
  quietly .venv/bin/python -m pip install ${GPIPE_TORCH_INDEX:+--extra-index-url "$GPIPE_TORCH_INDEX"} "$@" ||
    fail "could not install the Python packages ${missing[*]} (see $log; is there a network?)"
  mkdir -p .venv/installed
  (cd .venv/installed && touch "$@")
}

# configure PRESET [cmake argument...]
configure() {
  quietly cmake --preset "$1" -DGPIPE_PYTHON="$GPIPE_PYTHON" "${@:2}" ||
    { tail -n 20 "$log" >&2 && fail "cmake failed"; }
}

# Prints how many compilers to run at once: one per core, each with 2 GB of memory.
parallel_jobs() {
  awk -v cores="$(nproc)" '/^MemAvailable/ {n = int($2 / 2e6); print n < 1 ? 1 : n < cores ? n : cores}' /proc/meminfo
}

mkdir -p build
: >"$log"
