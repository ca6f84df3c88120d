#!/usr/bin/env bash
# The check on a machine with an NVIDIA GPU: at most eight minutes, no network. See docs/gpu.md.
#
#   scripts/gpu_check.sh [FOLDER_OF_WHEELS [ARGUMENTS OF gpu_check.py…]]
#
# Wheels (pure Python ones) of what the machine lacks, such as pytest, are unpacked into a temporary folder; what is
# installed there already is used as it is. Nothing is installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheels=${1:-}
[[ $# -gt 0 ]] && shift
python=${PYTHON:-python3}

extra=$(mktemp -d "${TMPDIR:-/tmp}/aitune-wheels-XXXXXX")
trap 'rm -rf "$extra"' EXIT
if [[ -n $wheels ]]; then
    [[ -d $wheels ]] || { echo "gpu_check: there is no folder $wheels" >&2; exit 2; }
    for wheel in "$wheels"/*-none-any.whl; do
        [[ -e $wheel ]] || { echo "gpu_check: no pure Python wheels in $wheels" >&2; exit 2; }
        name=$(basename "$wheel")
        name=${name%%-*}
        "$python" -c "import importlib.metadata as m; m.version('${name//_/-}')" 2>/dev/null && continue
        "$python" -m zipfile -e "$wheel" "$extra"
        echo "gpu_check: $name from $wheels"
    done
fi
export PYTHONPATH="$root:$extra${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
cd "$root"
timeout --kill-after=10 475 "$python" scripts/gpu_check.py "$@"
