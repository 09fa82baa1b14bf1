# Sourced by ./test and ./demo, which run from the repository's root. Brings a bare Debian 12 to where the project can
# be built; where all is there it starts no package manager.
#
#   GPIPE_PYTHON   a Python interpreter whose torch to use, instead of one installed into .venv

readonly python_packages=(torch==2.11.0 torchvision==0.26.0 tensorboard==2.21.0 matplotlib==3.11.2 numpy
  scikit-build-core==1.1.2 pytest==9.2.0 mypy==2.4.1 pybind11-stubgen==3.0.0)
readonly packages=(clang clang-format cmake g++ libabsl-dev libbenchmark-dev libclang-rt-14-dev libcli11-dev libgif-dev
  libgmock-dev libjpeg62-turbo-dev libpng-dev ninja-build nlohmann-json3-dev python3-dev python3-venv zlib1g-dev)
readonly log=build/setup.log

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# Runs a command with its output in the log.
quietly() { "$@" >>"$log" 2>&1 </dev/null; }

install_packages() {
  command -v dpkg-query >/dev/null || return 0 # no Debian: cmake names what it does not find
  local missing=()
  mapfile -t missing < <(
    dpkg-query --show --showformat='${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null |
      awk '$2 == "installed" {print $1}' | sort | comm -13 - <(printf '%s\n' "${packages[@]}" | sort))
  ((${#missing[@]})) || return 0

  local as_root=()
  if ((EUID != 0)); then
    sudo -v 2>/dev/null || fail "missing Debian packages, and neither root nor sudo to install them: ${missing[*]}"
    as_root=(sudo)
  fi
  echo "Installing Debian packages: ${missing[*]}"
  quietly "${as_root[@]}" apt-get update || true # a mirror that fails need not be one that is needed
  quietly "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}" ||
    fail "could not install the Debian packages ${missing[*]} ($log says why; is there a network?)"
}

install_torch() {
  if [[ -n ${GPIPE_PYTHON:-} ]]; then
    "$GPIPE_PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null ||
      fail "GPIPE_PYTHON=$GPIPE_PYTHON is no Python interpreter that has torch"
    return
  fi
  GPIPE_PYTHON=$PWD/.venv/bin/python
  local done # named by what it stands for, so that a .venv of other packages gets these
  done=.venv/gpipe-$(IFS=- && echo "${python_packages[*]}")
  [[ -e $done ]] && return
  local python=/usr/bin/python3 # the one that python3-venv belongs to
  [[ -x $python ]] || python=python3
  echo "Installing ${python_packages[*]} into .venv (5 GB on disk with its CUDA libraries)"
  quietly "$python" -m venv .venv || fail "could not make .venv with $python ($log says why)"
  quietly .venv/bin/python -m pip install "${python_packages[@]}" ||
    fail "could not install the Python packages ${python_packages[*]} ($log says why; is there a network?)"
  touch "$done"
}

# Two gigabytes for each compiler, so that small machines with many cores do not run out.
parallel_jobs() {
  awk -v cores="$(nproc)" '/^MemAvailable/ {n = int($2 / 2e6); print n < 1 ? 1 : n < cores ? n : cores}' /proc/meminfo
}

mkdir -p build
: >"$log"
install_packages
install_torch
