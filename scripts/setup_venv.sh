#!/usr/bin/env bash
# Makes the virtual environment (.venv) and installs the project in it; does nothing when that is done already.
#
#   PYTHON=python3.12       the interpreter to use        (default: the first supported one on PATH)
#   TORCH=torch==2.13.0     what to ask pip for as torch  (default: the version of development and CI)
#   EXTRAS=dev,openvino     extras of pyproject.toml      (default: dev)
#
# The stamp is written last, so that an interrupted run is taken up again.  It holds everything the result depends on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/.venv
stamp=$venv/setup-stamp
log=$venv/pip.log
torch=${TORCH:-torch==2.13.0}
extras=${EXTRAS:-dev}
supported="3.10 3.11 3.12 3.13"

# An environment or a pip setting of the caller's must not lead packages elsewhere.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_USER

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

# Prints "3.11", or nothing where $1 is no Python that runs (a launcher may be there without its Python).
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
is_supported() { [[ -n $1 && " $supported " == *" $1 "* ]]; }

pick_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        version=$(version_of "$PYTHON")
        is_supported "$version" ||
            fail "PYTHON=$PYTHON is ${version:+Python }${version:-not a Python that runs}; needed is one of: $supported."
        python=$PYTHON
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        version=$(version_of "$candidate")
        if is_supported "$version"; then
            python=$candidate
            return
        fi
    done
    fail "no supported Python on PATH (needed is one of: $supported)." \
        "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3 ..."
}

check_compiler() {
    # The same choice as torch's: $CXX, else g++.
    local compiler=${CXX:-g++}
    command -v "${compiler%% *}" >/dev/null ||
        fail "no C++ compiler ($compiler) on PATH; engines are compiled with it." \
            "Install it (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or name another one in CXX."
}

fingerprint() {
    # The path is part of it: a virtual environment that was copied still points to the tree it came from.
    { printf '%s\n' "$venv" "$version" "$torch" "$extras"; cat pyproject.toml; } | sha256sum | cut -d ' ' -f 1
}

is_ready() { [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && [[ $(version_of "$venv/bin/python") == "$version" ]]; }

is_reusable() {
    [[ $(version_of "$venv/bin/python") == "$version" ]] &&
        grep -qF "$venv" "$venv/bin/activate" 2>/dev/null &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

make_venv() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments: its venv or ensurepip module is missing." \
            "Install it (Debian, Ubuntu: apt-get install python$version-venv) and run the same command again."
    rm -rf "$venv"
    "$python" -m venv "$venv" ||
        fail "$python -m venv $venv failed (see above); is the disk full or the folder read-only?"
}

# Engines of AOTInductor compile without Python's headers; torch.compile's kernels for the CPU do not.
note_missing_headers() {
    "$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        say "note: no Python.h, so torch.compile is no candidate on the CPU; apt-get install python$version-dev adds it"
}

# install WHAT ARGUMENT...: pip install, with a reason and a next step when it fails.
install() {
    local what=$1 reason
    shift
    say "installing $what"
    # On a terminal pip shows its own progress bars; in a log they would be noise.
    local -a options=(--disable-pip-version-check --log "$log")
    [[ -t 1 ]] || options+=(--quiet --progress-bar off)
    "$venv/bin/python" -m pip install "${options[@]}" "$@" </dev/null && return
    if grep -qs 'No space left on device' "$log"; then
        reason="The disk is full: free some space (a CUDA build of torch takes several GB)"
    elif grep -qsE 'NewConnectionError|Connection (broken|refused|reset|timed out)|connection error|name resolution|Read timed out|ProxyError|SSLError' "$log"; then
        reason="The package index could not be reached: check the network, or the proxy and PIP_INDEX_URL settings"
    else
        reason="Its own lines above say why: put that right"
    fi
    fail "pip could not install $what." "$reason, then run the same command again (what was installed is kept)." "The whole log: $log"
}

trap 'printf "\nsetup: interrupted; the same command goes on from here\n" >&2; exit 130' INT TERM
check_compiler
pick_python
wanted=$(fingerprint)
is_ready && exit 0

# One set-up at a time; the other waits, and then finds the work done.
exec 9<pyproject.toml
if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "another set-up of this folder is running; waiting for it"
    flock 9
fi
is_ready && exit 0

say "$venv with Python $version ($(command -v "$python")); this takes a few minutes, once"
rm -f "$stamp"
note_missing_headers
is_reusable || make_venv
: >"$log"
# By itself and first: asked for by version, pip takes a CPU build where one is offered.
install "$torch" "$torch"
# torch is named again, so that no dependency replaces it.
install "aitune-hf[$extras] and its dependencies" "$torch" --editable ".[$extras]"
printf '%s\n' "$wanted" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done; a next run installs nothing"
