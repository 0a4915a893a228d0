"""Everything that has to be patched in nerfstudio 1.1.5 itself, in one place.

Each patch looks for what it replaces and says why it is needed. Whatever can be done by subclassing is done there
instead.
"""

from __future__ import annotations

import atexit
import gc
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nerfstudio.viewer.viewer import Viewer


@contextmanager
def without_lpips_download() -> Iterator[None]:
    """Keeps ``SplatfactoModel.populate_modules`` from building LPIPS.

    Reason: the constructor downloads weights, so that every command, training included, fails on a machine
    without internet. The model builds the metric itself when it first evaluates an image.
    """
    from torchmetrics.image import lpip

    original = lpip.LearnedPerceptualImagePatchSimilarity
    lpip.LearnedPerceptualImagePatchSimilarity = _NoLpips  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        lpip.LearnedPerceptualImagePatchSimilarity = original  # type: ignore[misc]


class _NoLpips(torch.nn.Module):
    """Stands in for LPIPS while splatfacto's constructor runs; has no parameters and is never called."""

    def __init__(self, **_: object) -> None:
        super().__init__()


def provide_ffmpeg() -> None:
    """Points mediapy, which writes the videos of ``ns-render``, at the ffmpeg inside the imageio-ffmpeg wheel.

    Reason: mediapy looks for an ``ffmpeg`` program only, and many machines have none. A program on the PATH wins.
    """
    if shutil.which("ffmpeg"):
        return
    import imageio_ffmpeg
    import mediapy

    if hasattr(mediapy, "set_ffmpeg"):
        mediapy.set_ffmpeg(imageio_ffmpeg.get_ffmpeg_exe())


SMALLEST_SHARE = 4
"""While the mouse moves, the viewer's frames shrink to no less than this fraction of the chosen resolution."""


def steady_viewer() -> None:
    """Mends two faults of nerfstudio's viewer.

    Reasons: a click on "Hide Train Cams" before the cameras are listed raises inside a lock that is then never
    released; and the resolution of moving frames is chosen as if the cost were proportional to pixels, so that with
    the fixed cost of many splats it spirals down to a few dozen pixels.
    """
    from nerfstudio.viewer.render_state_machine import RenderStateMachine
    from nerfstudio.viewer.viewer import Viewer

    if not hasattr(Viewer, "camera_handles"):
        Viewer.camera_handles = {}  # type: ignore[attr-defined]
    original = getattr(RenderStateMachine, "_calculate_image_res", None)
    if original is None or hasattr(original, "keeps_a_share"):
        return

    def at_least_a_share(self: Any, aspect_ratio: float) -> tuple[int, int]:
        height, width = original(self, aspect_ratio)
        smallest = self.viewer.control_panel.max_res // SMALLEST_SHARE
        if max(height, width) >= smallest:
            return height, width
        factor = smallest / max(height, width)
        return int(height * factor), int(width * factor)

    at_least_a_share.keeps_a_share = True  # type: ignore[attr-defined]
    RenderStateMachine._calculate_image_res = at_least_a_share  # type: ignore[method-assign]


def viewer_tab(viewer: Viewer, label: str, icon: str) -> AbstractContextManager[Any]:
    """A new tab beside "Control", "Render" and "Export", as a context for what goes into it.

    Reason: nerfstudio keeps the group of its tabs in a local variable. Where it cannot be found among viser's elements,
    the content goes into a folder below the tabs.

    Args:
        icon: name of one of viser's icons.
    """
    import viser

    gui = viewer.viser_server.gui
    for container in getattr(gui, "_container_handle_from_id", {}).values():
        for element in getattr(container, "_children", {}).values():
            if hasattr(element, "add_tab"):
                return element.add_tab(label, getattr(viser.Icon, icon, None))
    return gui.add_folder(label)


def console_columns(names: Sequence[str]) -> None:
    """Has nerfstudio's console line show some scalars beside its own.

    Reason: the option that chooses its columns takes nerfstudio's own names only.
    """
    from nerfstudio.utils import writer

    for one in writer.EVENT_WRITERS:
        tracked = getattr(one, "stats_to_track", None)
        if isinstance(tracked, list):
            tracked.extend(name for name in names if name not in tracked)


def end_quickly() -> None:
    """Keeps Python from collecting everything once more when the process ends, which takes seconds after training."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
