#!/usr/bin/env bash
# Build, prove and measure on a machine with AMX and a GPU, offline, in one go.
#
#   OUT=/tmp/out benchmarks/on_gpu_box.sh [build] [test] [differential] [moe] [models]
#
# Uses the python3 that is there with its torch; wheels it lacks are taken from $WHEELS. Logs and results land in $OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-/tmp/ktinject-out}
WHEELS=${WHEELS:-}
MACHINE=${MACHINE:-"reference box: 16 vCPU Emerald Rapids, H200"}
steps=${*:-build test differential moe}
mkdir -p "$OUT"
started=$SECONDS
say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - started)); }

for step in $steps; do
  say "$step"
  case $step in
    build)
      if [ -n "$WHEELS" ]; then python3 -m pip install -q --no-index --no-deps "$WHEELS"/*.whl; fi
      python3 -m pip install -q --no-build-isolation --no-deps --no-index -e . 2>&1 | tee "$OUT/build.log" | tail -n 5
      python3 -c 'import ktinject; print(ktinject.doctor())'
      ;;
    test) python3 -m pytest -q -x --durations=5 2>&1 | tee "$OUT/test.log" | tail -n 25 ;;
    differential)
      python3 tests/native/differential.py --cases "${CASES:-4000}" --kernel amx_bf16 amx_int8 amx_int4 |
        tee "$OUT/differential.log"
      ;;
    moe)
      # shellcheck disable=SC2086
      python3 benchmarks/bench_moe.py --machine "$MACHINE" --csv "$OUT/results.csv" ${MOE:-} | tee "$OUT/moe.log"
      ;;
    models)
      for model in examples/models/tiny-*; do
        python3 -m ktinject.cli eval "$model" | tee -a "$OUT/models.log"
      done
      ;;
    *) echo "no step '$step'" >&2 && exit 2 ;;
  esac
done
say done
