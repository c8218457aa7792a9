#!/usr/bin/env bash
# Build, prove and measure on a machine with AMX and a GPU, offline, in one go.
#
#   OUT=/tmp/out benchmarks/on_gpu_box.sh [build] [test] [gpu] [sanitize] [differential] [moe] [linear] [mla] [handoff]
#                                         [generate] [deferral] [models]
#
# Uses the python3 that is there with its torch; wheels it lacks are taken from $WHEELS. Logs and results land in $OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-/tmp/ktinject-out}
WHEELS=${WHEELS:-}
MACHINE=${MACHINE:-"reference box: 16 vCPU Emerald Rapids, H200"}
steps=${*:-build test gpu differential moe generate}
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
    gpu) python3 -m pytest -q -m gpu 2>&1 | tee "$OUT/gpu.log" | tail -n 25 ;;
    sanitize)
      for tool in memcheck racecheck; do
        compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -m pytest -q -x -m gpu \
          tests/operators/test_{handoff,hybrid_experts,streaming,int4_linear,fp8_linear,rms_norm}.py ${SANITIZE:-} 2>&1 |
          tee "$OUT/$tool.log" | tail -n 5
      done
      ;;
    differential)
      python3 tests/native/differential.py --cases "${CASES:-4000}" \
        --kernel amx_bf16 amx_int8 amx_int4 amx_fp8 amx_mxfp4 |
        tee "$OUT/differential.log"
      ;;
    moe)
      # shellcheck disable=SC2086
      python3 benchmarks/bench_moe.py --machine "$MACHINE" --csv "$OUT/results.csv" ${MOE:-} | tee "$OUT/moe.log"
      ;;
    linear | mla | handoff | deferral)
      python3 "benchmarks/bench_$step.py" --machine "$MACHINE" --csv "$OUT/$step.csv" | tee "$OUT/$step.log"
      ;;
    generate)
      # shellcheck disable=SC2086
      python3 benchmarks/bench_generate.py --layers 8 --machine "$MACHINE" --csv "$OUT/generate.csv" ${GENERATE:-} |
        tee "$OUT/generate.log"
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
