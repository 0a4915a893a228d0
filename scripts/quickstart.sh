#!/usr/bin/env bash
# Set-up and a first run: installs into .venv, writes a sample scene, trains, evaluates, exports.
# A second call goes on from what is there. Everything lands in outputs/quickstart.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

install_plugin plots
export PATH="$venv/bin:$PATH"
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::FutureWarning}" # nerfstudio with a newer torch
folder="$repository/outputs/quickstart"
scene="$folder/object"
run="$folder/runs/object/odin-splatfacto/quickstart"
views=2000 # rendered in training, over all devices
# Two processes where there are two cores and no GPU.
devices="$(python -c 'import os, torch; print(1 if torch.cuda.is_available() else min(2, len(os.sched_getaffinity(0))))')"
mkdir -p "$folder"

say "Sample scene: $scene"
odin-sample object --output "$scene"

if compgen -G "$run/nerfstudio_models/step-*.ckpt" >/dev/null; then
    say "Already trained: $run (remove it to train again)"
else
    say "Training on $views views, $devices at a time: ns-train odin-splatfacto --data $scene"
    rm -rf "$run"
    ns-train odin-splatfacto --data "$scene" --output-dir "$folder/runs" --timestamp quickstart \
        --machine.num-devices "$devices" --max-num-iterations "$views" \
        --pipeline.model.num-downscales 1 --pipeline.model.resolution-schedule 500 \
        --vis tensorboard --steps-per-eval-image 0 --steps-per-eval-all-images 0
fi

say "Evaluating on the held-out views: ns-eval"
ns-eval --load-config "$run/config.yml" --output-path "$folder/metrics.json"
say "Exporting: ns-export gaussian-splat"
ns-export gaussian-splat --load-config "$run/config.yml" --output-dir "$folder/export"

say "Done"
python - "$folder" "$run" <<'PY'
import json
import shlex
import sys
from pathlib import Path

folder, run = map(Path, sys.argv[1:])
results = json.loads((folder / "metrics.json").read_text())["results"]
print("  ".join(f"{name.upper()} {results[name]:.3f}" for name in ("psnr", "ssim", "lpips") if name in results))
print(f"metrics     {folder / 'metrics.json'}")
print(f"checkpoint  {run / 'nerfstudio_models'}")
print(f"splats      {folder / 'export' / 'splat.ply'}")
viewer = shlex.join([f"{sys.prefix}/bin/ns-viewer", "--load-config", str(run / "config.yml")])
print(f"look at it  {viewer}")
PY
