"""What an installed package has."""

from __future__ import annotations

from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="reads pyproject.toml with Python's own parser, which 3.10 has not")
REPOSITORY = Path(__file__).resolve().parents[1]


def test_every_folder_of_the_package_is_installed() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    folders = {
        ".".join(file.parent.relative_to(REPOSITORY).parts)
        for file in (REPOSITORY / "odin_nerfstudio").rglob("__init__.py")
        if not file.parent.is_symlink()
    }
    assert set(settings["tool"]["setuptools"]["packages"]) == folders | {"odin_nerfstudio.method_configs"}


def test_every_method_is_registered() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    methods = settings["project"]["entry-points"]["nerfstudio.method_configs"]
    files = {file.stem for file in (REPOSITORY / "method_configs").glob("odin_*.py")}
    assert {entry.split(":")[0].rsplit(".", 1)[1] for entry in methods.values()} == files
