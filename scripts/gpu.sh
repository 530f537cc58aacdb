#!/usr/bin/env bash
# Runs all checks and measurements that need a GPU, in at most ten minutes, and writes $OUT/*.json and $OUT/report.md.
# A second call continues. Arguments are passed on: scripts/gpu.sh --help. docs/gpu.md describes the parts.
#
# Environment:
#   PYTHON  interpreter (default: .venv/bin/python if it exists, else python3)
#   WHEELS  folder of wheels to use in addition to the interpreter's packages; no network is needed (default: none). A
#           wheel may be cut into NAME.whl.part0, NAME.whl.part1 and so on
#   OUT     folder of the results (default: gpu_results)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
OUT=${OUT:-gpu_results}
mkdir -p "$OUT"
site=$(cd "$OUT" && pwd)/site

if [ -n "${WHEELS:-}" ]; then
    joined=$(mktemp -d)
    trap 'rm -rf "$joined"' EXIT
    shopt -s nullglob
    printf '%s\n' "$WHEELS"/*.whl.part* | sort -V | while read -r part; do
        if [ -n "$part" ]; then
            cat "$part" >> "$joined/$(basename "${part%.part*}")"
        fi
    done
    wheels=("$WHEELS"/*.whl "$joined"/*.whl)
    [ ${#wheels[@]} -gt 0 ] || { echo "gpu: no wheels in $WHEELS; expected files *.whl or *.whl.partN" >&2; exit 2; }
    # A folder of an earlier call with the same wheels is complete once it has the list.
    list=$(cd "$WHEELS" && cksum ./*.whl ./*.whl.part*)
    if [ "$list" != "$(cat "$site.list" 2> /dev/null)" ]; then
        rm -rf "$site" "$site.list"
        "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$site" "${wheels[@]}"
        echo "$list" > "$site.list"
    fi
    rm -rf "$joined"
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m scripts.gpu --out "$OUT" "$@"
