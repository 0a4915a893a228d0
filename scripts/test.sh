#!/usr/bin/env bash
# Set-up and the whole test suite. Further arguments go to pytest: bash scripts/test.sh -k rasterizer
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

install_plugin test
cd "$repository"
export PATH="$venv/bin:$PATH"
say "Lint (ruff)"
ruff check .
if command -v node >/dev/null 2>&1; then
    say "Types (pyright)"
    pyright
else
    say "Types: pyright needs node, which is not on this machine; left out"
fi
say "Compiling the CPU kernels once"
python -c "from odin_nerfstudio.rendering import warm_up; warm_up()"
say "Tests"
python -m pytest -n 2 --dist loadfile "$@"  # most tests start processes and wait for them
