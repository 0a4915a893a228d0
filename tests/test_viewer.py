"""The live viewer in a real browser: frames, pause and resume, no cost without a browser, a clean end; ns-viewer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, end_group, find_chromium, wait_until
from training import sample_scene, small_config, train

CHROMIUM = find_chromium()

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (or set CHROMIUM to its path)"),
    pytest.mark.timeout(900),
]

PATIENCE = 200
"""Seconds for anything to happen; ample, since other work may share the machine."""

OBSERVED = """
from nerfstudio.viewer.render_state_machine import RenderStateMachine
from nerfstudio.viewer.viewer import Viewer

def saying(words, function):
    def call(*arguments, **named):
        result = function(*arguments, **named)
        print(words, flush=True)
        return result
    return call

RenderStateMachine._render_img = saying("the viewer has rendered", RenderStateMachine._render_img)
Viewer.init_scene = saying("the viewer is ready", Viewer.init_scene)

from nerfstudio.scripts.{module} import entrypoint
entrypoint()
"""
"""A nerfstudio command as it is, except that it says what its viewer does. The server answers before the viewer is
ready, and the buttons of 1.1.5 can hang it until then."""


class Command:
    """A nerfstudio command with a viewer, in the background; a context manager that leaves no process behind."""

    def __init__(self, module: str, log: Path, *arguments: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._arguments = [sys.executable, "-c", OBSERVED.format(module=module), *map(str, arguments)]
        self._arguments += ["--viewer.websocket-host", "127.0.0.1", "--viewer.websocket-port", str(port)]

    def __enter__(self) -> Command:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
            )
        return self

    def __exit__(self, *_: object) -> None:
        end_group(self._process)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def step(self) -> int:
        """The last step that was logged; -1 before the first."""
        steps = re.findall(r"^(\d+) \(\d+\.\d+%\)", self.output(), flags=re.MULTILINE)
        return int(steps[-1]) if steps else -1

    def renders(self) -> int:
        return self.output().count("the viewer has rendered")

    def wait(self, probe: Callable[[], object], what: str) -> None:
        """Waits until ``probe`` gives something true, as long as the command runs."""

        def alive() -> object:
            if self._process.poll() is not None:
                raise AssertionError(f"the command ended while waiting for {what}:\n{self.output()[-4000:]}")
            return probe()

        wait_until(alive, PATIENCE, what)

    def interrupt(self, patience: float = 40) -> int:
        """Sends one Ctrl-C and returns the exit status; the patience is for busy machines, it takes seconds."""
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs {patience:g} s after Ctrl-C:\n{self.output()[-2000:]}") from None


def picture(browser: Browser, path: Path | None = None) -> np.ndarray:
    """The part of the page that shows the scene, ``[H, W, 3]`` uint8."""
    box = browser.evaluate(
        """(() => {
            const canvas = document.querySelector("canvas").getBoundingClientRect();
            return [canvas.top, canvas.bottom, canvas.left, canvas.right];
        })()"""
    )
    top, bottom, left, right = map(round, box)
    return browser.screenshot(path)[top:bottom, left:right]


def shows_a_scene(image: np.ndarray) -> bool:
    """Whether most of the picture differs from its commonest colour, as no plain background does."""
    colors, counts = np.unique(image.reshape(-1, 3), axis=0, return_counts=True)
    distance = np.abs(image.astype(int) - colors[counts.argmax()]).max(axis=2)
    return bool((distance > 8).mean() > 0.5 and len(colors) > 1000)


def open_viewer(browser: Browser, url: str) -> None:
    """Opens the viewer without the thumbnails of the training images, which would pass for a scene."""
    browser.open(url)
    wait_until(lambda: "Train Cams" in browser.text(), PATIENCE, "the viewer's buttons")
    if "Hide Train Cams" in browser.text():  # else an earlier browser has hidden them
        browser.click("Hide Train Cams", PATIENCE)


def final_frame(browser: Browser, path: Path) -> np.ndarray:
    """The frame in full resolution, once it does not change any more: the resolution is shown before the frame is."""
    frames = [np.zeros(0)] * 3

    def settled() -> bool:
        frames.append(picture(browser, path))
        full = re.search(r"Resolution: (\d+)x(\d+)px", browser.text())
        still = all(np.array_equal(frames[-1], earlier) for earlier in frames[-4:-1])
        return bool(full) and max(map(int, full.groups())) == 512 and still and shows_a_scene(frames[-1])

    wait_until(settled, PATIENCE, "a settled frame of the scene in full resolution", every=1)
    return frames[-1]


def coarse(frame: np.ndarray) -> np.ndarray:
    """Means of blocks of the scene: on a busy machine viser draws with fewer pixels than the page has, by its own
    judgement of every moment. Left of the panel, whose tab "Odin" a training has only; below the title. [H, W, 3]."""
    scene = frame[60:, :464].astype(float)
    rows, columns = scene.shape[0] // 16, scene.shape[1] // 16
    return scene[: 16 * rows, : 16 * columns].reshape(rows, 16, columns, 16, 3).mean((1, 3))


def drag(browser: Browser) -> None:
    """Turns the camera with the mouse."""
    browser.command("Input.dispatchMouseEvent", type="mousePressed", x=150, y=300, button="left", buttons=1)
    for x in range(150, 260, 10):
        browser.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=300, button="left", buttons=1)
    browser.command("Input.dispatchMouseEvent", type="mouseReleased", x=250, y=300, button="left")


def test_viewer_of_a_training_and_of_its_result(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    scene = sample_scene(tmp_path)
    training = Command(
        "train",
        tmp_path / "train.log",
        *("odin-splatfacto", "--data", scene, "--output-dir", tmp_path, "--timestamp", "run", "--vis", "viewer"),
        *("--max-num-iterations", 600, "--start-paused", "True", "--machine.device-type", "cpu"),
        *("--logging.steps-per-log", 1, "--logging.local-writer.max-log-size", 0),
        *("--pipeline.model.num-downscales", 0, "--pipeline.model.warmup-length", 100),
    )
    with training:
        training.wait(lambda: "the viewer is ready" in training.output(), "the viewer of the training")
        assert training.renders() == 0
        with Browser(CHROMIUM) as browser:
            open_viewer(browser, training.url)
            wait_until(lambda: shows_a_scene(picture(browser)), PATIENCE, "a frame that is not the background")
            assert training.step() == -1  # started paused

            browser.click("Resume Training")
            training.wait(lambda: training.step() > 5, "steps after the first resume")
            browser.click("Pause Training")
            wait_until(lambda: "Resume Training" in browser.text(), PATIENCE, "the resume button")
            time.sleep(1)  # a step that was running ends
            paused, before = training.step(), final_frame(browser, tmp_path / "paused.png")
            drag(browser)
            turned = final_frame(browser, tmp_path / "turned.png")
            assert np.abs(turned.astype(int) - before).mean() > 3  # the paused viewer still follows the mouse
            assert training.step() == paused < 500
            browser.click("Resume Training")
            training.wait(lambda: training.step() > paused, "steps after the second resume")
            assert [line for line in browser.console if line.startswith("exception")] == []

        training.wait(lambda: "Connection closed" in training.output(), "the browser's leave")
        time.sleep(0.5)  # a frame that was being rendered ends
        step, renders = training.step(), training.renders()
        assert renders > 0
        training.wait(lambda: "ctrl+c to quit" in training.output(), "the end of the training")
        assert training.step() > step
        assert training.renders() == renders  # no browser, no renders

        with Browser(CHROMIUM) as browser:
            open_viewer(browser, training.url)
            trained = final_frame(browser, tmp_path / "trained.png")
        assert training.interrupt() == 0

    config = tmp_path / scene.name / "odin-splatfacto" / "run" / "config.yml"
    with Command("viewer.run_viewer", tmp_path / "viewer.log", "--load-config", config) as viewer:
        viewer.wait(lambda: "the viewer is ready" in viewer.output(), "ns-viewer")
        with Browser(CHROMIUM) as browser:
            open_viewer(browser, viewer.url)
            loaded = final_frame(browser, tmp_path / "loaded.png")
        viewer.interrupt()
    assert loaded.shape == trained.shape
    assert np.abs(coarse(loaded) - coarse(trained)).mean() < 3 < np.abs(coarse(before) - coarse(trained)).mean()


def test_tab_odin_and_its_outputs_on_two_ranks(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    scene = sample_scene(tmp_path, "city", views=16)
    training = Command(
        "train",
        tmp_path / "train.log",
        *("odin-splatfacto", "--data", scene, "--output-dir", tmp_path, "--timestamp", "run", "--vis", "viewer"),
        *("--max-num-iterations", 100_000, "--machine.device-type", "cpu", "--machine.num-devices", 2),
        *("--logging.steps-per-log", 1, "--logging.local-writer.max-log-size", 0),
        *("--pipeline.model.num-downscales", 0, "--pipeline.model.warmup-length", 100_000),
    )

    def ranks(text: str) -> dict[int, tuple[int, str]]:
        """Step and activity of each rank, as the tab says."""
        found = re.findall(r"rank (\d)\s+step (\d+)\s+(computing|updating|waiting|paused|evaluating)", text)
        return {int(rank): (int(step), what) for rank, step, what in found}

    with training:
        training.wait(lambda: training.step() > 3, "steps")
        with Browser(CHROMIUM, 900, 800) as browser:
            open_viewer(browser, training.url)
            browser.click("Odin", PATIENCE)
            training.wait(lambda: len(ranks(browser.text())) == 2, "both ranks in the tab")
            first, seen = ranks(browser.text()), set()

            def changed() -> bool:
                last = ranks(browser.text())
                seen.update(what for _, what in last.values())
                return len(last) == 2 and all(last[r][0] > first[r][0] for r in range(2)) and len(seen) > 1

            training.wait(changed, "ranks that go on and change what they are doing")
            assert re.search(r"quality, rlg order\s+step \d+ of \d+\s+epoch \d+, view \d+ of \d+", browser.text())
            browser.click("Pause Training")
            states = lambda: [what for _, (_, what) in sorted(ranks(browser.text()).items())]  # noqa: E731
            training.wait(lambda: states() == ["paused", "waiting"], "rank 0 paused and rank 1 waiting for it")
            browser.screenshot(tmp_path / "tab.png")
            browser.click("Resume Training")

            browser.click("Control")
            wait_until(lambda: shows_a_scene(picture(browser)), PATIENCE, "a frame of the scene")
            shown, frame = "rgb", picture(browser, tmp_path / "rgb.png").astype(int)
            for output in ("odin_conflicts", "odin_lag", "odin_writer"):
                browser.choose(shown, output)

                def drawn(output: str = output, before: np.ndarray = frame) -> bool:
                    now = picture(browser, tmp_path / f"{output}.png").astype(int)
                    colored = (np.ptp(now, axis=2) > 40).any()  # primitives that have nothing to show are gray
                    return bool(colored and now.std() > 5 and np.abs(now - before).mean() > 3)

                training.wait(drawn, f"another picture of the scene for {output}")
                shown, frame = output, picture(browser).astype(int)
            blue = frame[..., 2] - frame[..., 0]
            assert blue.max() > 40 and blue.min() < -40  # primitives of rank 0 and of rank 1
            assert [line for line in browser.console if line.startswith("exception")] == []
        assert training.interrupt(120) == 0


def test_normals_of_surfels_are_an_output(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    options = {"method": "odin-2dgs", "pipeline__model__num_downscales": 0}
    run = train(small_config(sample_scene(tmp_path), tmp_path, 60, **options)).base_dir
    with Command("viewer.run_viewer", tmp_path / "viewer.log", "--load-config", run / "config.yml") as viewer:
        viewer.wait(lambda: "the viewer is ready" in viewer.output(), "ns-viewer")
        with Browser(CHROMIUM, 900, 800) as browser:
            open_viewer(browser, viewer.url)
            shown, frame = "rgb", final_frame(browser, tmp_path / "rgb.png").astype(int)
            for output in ("normal", "surface_normal"):
                browser.choose(shown, output)

                def drawn(output: str = output, before: np.ndarray = frame) -> bool:
                    now = picture(browser, tmp_path / f"{output}.png")
                    return shows_a_scene(now) and float(np.abs(now.astype(int) - before).mean()) > 3

                viewer.wait(drawn, f"a picture of the scene for {output}")
                shown, frame = output, final_frame(browser, tmp_path / f"{output}.png").astype(int)
            assert [line for line in browser.console if line.startswith("exception")] == []
        viewer.interrupt()
