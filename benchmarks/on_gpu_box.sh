#!/usr/bin/env bash
# Build, prove and measure on a machine with AMX and a GPU, offline, in one go.
#
#   OUT=/tmp/out benchmarks/on_gpu_box.sh [build] [test] [gpu] [sanitize] [differential] [moe] [linear] [mla] [handoff]
#                                         [generate] [prefill] [hot_experts] [deferral] [models]
#
# Uses the python3 that is there with its torch; wheels it lacks are taken from $WHEELS. Logs and results land in $OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-/tmp/ktinject-out}
WHEELS=${WHEELS:-}
MACHINE=${MACHINE:-"reference box: 16 vCPU Emerald Rapids, H200"}
steps=${*:-build test gpu differential moe generate}
# Each of our kernels at least once, on odd shapes where there is a choice: what the sanitizers run.
SANITIZED=${SANITIZED:-"test_eager[3-dtype1 or some_ranks_on_the_gpu[9-ranks1 or experts_on_the_gpu[gpt_oss-int4-int4-32-0.25-3 \
  or experts_on_the_gpu[qwen3_moe-bf16-bf16-128-0.25-3 or unpacked_on_the_gpu_as_on_the_cpu[72-200 \
  or test_on_the_gpu[40-33 or scales_of_either_type or any_leading_shape or test_in_a_cuda_graph \
  or activations_are_rounded_as_torch_does or softmax_and_topk[6-2 or rotation_and_sdpa[True-256-255-2-24-2-64 \
  or rotation_and_sdpa[False-4096-3000-3 or linear_and_residual[Qwen3NextRMSNorm-1056-n4-3 or linear_and_residual[None-96-n3-1 or graph_are_the_module_s[3-True-sizes3-qwen3_next-dtype0 or those_of_the_module[3-True-nemotron_h-changes1-spec1-dtype0 \
  or those_of_the_module[1-False-lfm2_moe-changes3-spec3-dtype0 \
  or that_routes_and_a_residual[flags-7 or keeps_count[1-2048-3 or samples_as_torch_does_from_the_same_numbers[2048-3 \
  or rotation_is_the_module_s[8 or s_the_module_s[256-8-4-8-True or is_norm_and_rotation[halves-3 or advance_moves or experts_move[bf16-False or rounded_once or added_where_it_lies or every_kind_of_shape[64-False-dtype0-True"}
read -ra pytest <<<"python3 -m pytest -q ${PYTEST:-}" # PYTEST="-n 8" where pytest-xdist is installed
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
    test) "${pytest[@]}" --durations=5 2>&1 | tee "$OUT/test.log" | tail -n 25 ;;
    gpu) "${pytest[@]}" -m gpu 2>&1 | tee "$OUT/gpu.log" | tail -n 25 ;;
    sanitize)
      # Our kernels only: torch's and cuBLAS's are slow under these tools, and the races in them are not ours to mend.
      few=(-q -x -m gpu tests/operators/test_{handoff_gpu,hybrid_experts,hot_experts,streaming,int4_linear}.py
        tests/operators/test_{fp8_linear,rms_norm}.py tests/ktinject/generation/test_{decode,delta,recurrent}_ops.py -k "$SANITIZED")
      python3 tests/native/launched.py "${few[@]}" 2>&1 | tee "$OUT/launched.log" | tail -n 3
      # racecheck does not see that __syncwarp puts a warp's reads before the one lane that then arrives at a barrier in
      # shared memory; with RACECHECK, every lane of int4_linear's kernels arrives. And it breaks off in cuBLAS, in
      # torch.nn.functional.linear on 1025 tokens without any kernel of ours; RACECHECK leaves these cases out.
      for tool in memcheck racecheck; do
        [ "$tool" != racecheck ] || export RACECHECK=1
        compute-sanitizer --tool "$tool" --kernel-name kns=ktinject --error-exitcode 9 python3 -m pytest "${few[@]}" 2>&1 |
          tee "$OUT/$tool.log" | tail -n 5
      done
      ;;
    differential)
      python3 tests/native/differential.py --cases "${CASES:-4000}" \
        --kernel amx_bf16 amx_int8 amx_int4 amx_fp8 amx_mxfp4 amx_mxfp8 |
        tee "$OUT/differential.log"
      ;;
    moe)
      # shellcheck disable=SC2086
      python3 benchmarks/bench_moe.py --machine "$MACHINE" --csv "$OUT/results.csv" ${MOE:-} | tee "$OUT/moe.log"
      ;;
    linear | mla | handoff | deferral | prefill | hot_experts)
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
