#!/usr/bin/env bash
# What to run on the day a GPU is at hand (not yet run on one). Installs nothing; takes less than 8 minutes.
#   1. gsplat on CUDA against the CPU rasterizer: images and gradients, tolerances printed
#   2. 200 steps of ns-train odin-splatfacto on a sample scene
#   3. ns-eval of the result
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
mkdir -p "$work"

echo "== gsplat against the CPU rasterizer"
limit 240 python "$repository/scripts/gpu_compare.py"

echo "== 200 steps of training"
odin-sample object --output "$work/object" --views 40 --size 320x240
limit 120 ns-train odin-splatfacto --data "$work/object" --max-num-iterations 200 --vis tensorboard \
    --output-dir "$work/runs" --timestamp check --machine.device-type cuda

echo "== ns-eval"
limit 100 ns-eval --load-config "$work/runs/object/odin-splatfacto/check/config.yml" \
    --output-path "$work/metrics.json"
cat "$work/metrics.json"
echo "gpu_check: passed"
