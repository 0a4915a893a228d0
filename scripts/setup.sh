#!/usr/bin/env bash
# Creates .venv in the repository and installs the plugin into it. Sourced by the other scripts; does nothing when
# everything is there already.
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$repository/.venv"

say() { printf '\n== %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.10 python3; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "No Python 3.10 to 3.12 found. Install Python 3.11, or name one: PYTHON=/path/to/python3.11 bash $0" >&2
    return 1
}

install_plugin() {
    local extras="$1" wanted python
    # One stamp per state of pyproject.toml and choice of extras: a changed dependency installs again.
    wanted="$extras $(sha256sum "$repository/pyproject.toml" | cut -d' ' -f1)"
    if [ -x "$venv/bin/ns-train" ] && [ "$(cat "$venv/odin-installed" 2>/dev/null)" = "$wanted" ]; then
        say "Using $venv"
        return
    fi
    if [ ! -x "$venv/bin/python" ]; then
        python="$(find_python)"
        say "Creating $venv with $python"
        "$python" -m venv "$venv"
    fi
    say "Installing odin-nerfstudio and what it needs (minutes the first time: torch is large)"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --quiet -e "${repository}[$extras]"
    printf '%s' "$wanted" >"$venv/odin-installed"
}
