#!/usr/bin/env bash
# What only a GPU can show, in under six minutes on a Hopper card: builds the kernels, runs the tests that carry the marker
# `gpu`, then ratios against vendor GEMMs and copies, bitwise determinism and peak memory. The last lines are a table.
#
#   bench/gpu_check.sh            # PYTHON=… chooses the interpreter, OUT=… where logs go
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-runs/gpu_check}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
table="" failures=0

step() { # step NAME SECONDS COMMAND…
    local name=$1 limit=$2 start=$SECONDS status=ok
    shift 2
    echo "== $name"
    timeout "$limit" "$@" 2>&1 | tee "$OUT/$name.log"
    local code=${PIPESTATUS[0]}
    if [ "$code" -ne 0 ]; then
        status="failed ($code)"
        failures=$((failures + 1))
    fi
    table+=$(printf '%-14s %-14s %4d s   %s' "$name" "$status" $((SECONDS - start)) "$(tail -n 1 "$OUT/$name.log" | cut -c1-90)")$'\n'
}

"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "gpu_check: $PYTHON sees no CUDA device"; exit 1; }
install() { "$PYTHON" -m pip install -q --no-build-isolation "$@" -e .; }
"$PYTHON" -c 'import headrace' 2>/dev/null || install || install --no-deps
step build 75 "$PYTHON" setup.py -q build_ext --inplace
step tests 140 "$PYTHON" -m pytest -m gpu tests/kernels
step ratios 80 "$PYTHON" -m headrace.bench kernels --json "$OUT/ratios.json"
step report 40 "$PYTHON" -m headrace.bench.gpu_report

echo
"$PYTHON" -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'
printf '%s' "$table"
grep -hE "bitwise|peak memory" "$OUT/report.log" 2>/dev/null
exit $((failures > 0))
