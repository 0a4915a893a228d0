#!/usr/bin/env bash
# What to run on the day a GPU is at hand. NOT YET RUN ON ONE: no machine with a GPU was at hand when this was written.
# Installs nothing; takes about 20 minutes. Every part has a hard time limit, so a hang ends as a failure.
#   1. gsplat on CUDA against the CPU rasterizer: images and gradients, tolerances printed
#   2. what the runtime does on a device, in small: pinned buffers, Adam in one kernel, the two stages of a view
#   3. 200 steps of ns-train odin-splatfacto on a sample scene, and ns-eval of the result
#   4. two ranks on one GPU over gloo: barrier twice and quality once. gsplat sums with atomics, so that even barrier
#      differs from itself; quality may differ from barrier by three times as much (scripts/gpu_runs.py). Prints seconds,
#      bytes and where the ranks' time went. A longer run densifies, with the ranks' copies compared. One rank is killed
#      once: the job must end within 30 s
#   5. placement sharded, each of the four methods: one rank, and two that share the GPU, against replicated, by the same
#      rule; with poses, smoothing and geometric losses. Two longer runs densify, and one of them goes on replicated
#   6. two ranks over NCCL, as in 4, where there are two GPUs
# Usage: bash scripts/gpu_check.sh [folder for scene and outputs]
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="${1:-$repository/outputs/gpu_check}"
[ -d "$repository/.venv/bin" ] && export PATH="$repository/.venv/bin:$PATH"
limit() { timeout --kill-after=10 "$@"; }

python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "torch finds no CUDA device here; this check needs one" >&2
    exit 2
}
python - <<'PY'
import torch
import gsplat
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}, gsplat {gsplat.__version__}")
PY
devices="$(python -c 'import torch; print(torch.cuda.device_count())')"
mkdir -p "$work"

echo "== gsplat against the CPU rasterizer"
limit 240 python "$repository/scripts/gpu_compare.py"

echo "== parts of the runtime on a device"
limit 180 python -m pytest -q "$repository/tests/test_device_transports.py" "$repository/tests/test_device_twins.py" \
    "$repository/tests/test_device_stages.py" -k "cuda"

# train NAME STEPS OPTION...: trains the sample scene into $work/runs/object/$method/NAME
method=odin-splatfacto
train() {
    local name="$1" steps="$2" begin=$SECONDS
    shift 2
    limit 150 ns-train "$method" --data "$work/object" --max-num-iterations "$steps" --vis tensorboard \
        --output-dir "$work/runs" --timestamp "$name" --machine.device-type cuda "$@"
    echo "$method $name: $((SECONDS - begin)) s with start-up"
}

# sharded METHOD OPTION...: replicated twice on one rank, then sharded on one and on two ranks of one device, compared
sharded() {
    local method="$1" runs="$work/runs/object/$1" other
    shift
    local same=(--pipeline.odin.views-per-step 2 --pipeline.odin.order local "$@")
    train whole 100 "${same[@]}"
    train whole-again 100 "${same[@]}"
    train sharded-1 100 "${same[@]}" --pipeline.odin.placement sharded
    train sharded-2 100 "${same[@]}" --pipeline.odin.placement sharded --machine.num-devices 2
    for other in sharded-1 sharded-2; do
        python "$repository/scripts/gpu_runs.py" "$runs/whole" "$runs/whole-again" "$runs/$other"
    done
}

# sharded_densifies METHOD OPTION...: a longer run on two ranks of one device
sharded_densifies() {
    local method="$1"
    shift
    train sharded-densify 300 --machine.num-devices 2 --pipeline.odin.placement sharded \
        --pipeline.model.warmup-length 100 --pipeline.model.refine-every 40 "$@"
}

# two_ranks BACKEND: barrier twice and quality once on two ranks, compared; then a rank is killed
two_ranks() {
    local backend="$1" runs="$work/runs/object/odin-splatfacto" ranks=(--machine.num-devices 2 --pipeline.odin.backend "$1")
    train "$backend-barrier" 200 "${ranks[@]}" --pipeline.odin.mode barrier
    train "$backend-again" 200 "${ranks[@]}" --pipeline.odin.mode barrier
    train "$backend-quality" 200 "${ranks[@]}" --pipeline.odin.mode quality
    python "$repository/scripts/gpu_runs.py" "$runs/$backend-barrier" "$runs/$backend-again" "$runs/$backend-quality"
    # with densification; debug compares all ranks' copies, bit by bit, at every structural step
    train "$backend-densify" 300 "${ranks[@]}" --pipeline.odin.mode quality --pipeline.odin.debug True \
        --pipeline.model.warmup-length 100 --pipeline.model.refine-every 40
    killed_rank "$backend"
}

# killed_rank BACKEND: kills one rank of a job that trains, and waits for the job to end
killed_rank() {
    local backend="$1" log="$work/killed-$1.log" job victim begin tries
    limit 150 torchrun --standalone --nproc-per-node 2 -m odin_nerfstudio.train odin-splatfacto --data "$work/object" \
        --max-num-iterations 100000 --vis tensorboard --output-dir "$work/runs" --timestamp "$backend-killed" \
        --machine.device-type cuda --pipeline.odin.backend "$backend" >"$log" 2>&1 &
    job=$!
    for ((tries = 0; tries < 100; tries++)); do # until steps are reported
        grep -aq "% Done" "$log" && break
        sleep 1
    done
    victim="$(python - "$work/runs" "$backend-killed" <<'PY'
import os
import sys

own = {word.encode() for word in sys.argv[1:]}  # arguments of this very job
for entry in os.scandir("/proc"):
    if entry.name.isdigit():
        try:
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{entry.name}/cmdline", "rb") as file:
                command = file.read().split(b"\0")
        except OSError:
            continue
        if b"RANK=1" in words and own <= set(command):
            print(entry.name)
            break
PY
)"
    if [ -z "$victim" ]; then
        echo "rank 1 is not there; see $log" >&2
        exit 1
    fi
    begin=$SECONDS
    kill -9 "$victim"
    wait "$job" && { echo "the job ended well although a rank was killed; see $log" >&2; exit 1; }
    grep -m 1 "died or lost its connection" "$log" || { echo "rank 1 is not named; see $log" >&2; exit 1; }
    echo "$backend: a killed rank ended the job within $((SECONDS - begin)) s"
    [ $((SECONDS - begin)) -le 30 ]
}

echo "== 200 steps of training"
odin-sample object --output "$work/object" --views 40 --size 320x240
train check 200

echo "== ns-eval"
limit 100 ns-eval --load-config "$work/runs/object/odin-splatfacto/check/config.yml" \
    --output-path "$work/metrics.json"
cat "$work/metrics.json"

echo "== two ranks on one GPU, gloo"
(
    export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
    export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES%%,*}"
    two_ranks gloo
)

echo "== placement sharded on one GPU"
(
    export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
    export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES%%,*}"
    sharded odin-splatfacto --pipeline.model.camera-optimizer.mode SO3xR3
    sharded odin-splatfacto-aa --pipeline.model.smooth-3d True
    sharded odin-splatfacto-mcmc
    sharded odin-2dgs --pipeline.model.normal-start-iter 20 --pipeline.model.distortion-start-iter 20 \
        --pipeline.model.distortion-lambda 0.01
    sharded_densifies odin-splatfacto-mcmc
    sharded_densifies odin-splatfacto
    train goes-on 20 --load-dir "$work/runs/object/odin-splatfacto/sharded-densify/nerfstudio_models"
)

if [ "$devices" -ge 2 ]; then
    echo "== two ranks on two GPUs, NCCL"
    two_ranks nccl
else
    echo "== NCCL: left out, it needs two GPUs"
fi
echo "gpu_check: passed"
