"""From nerfstudio's dataset to a plan."""

from __future__ import annotations
