"""A headless Chromium for tests, steered by the Chrome DevTools Protocol over its WebSocket; nothing else is needed."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from websockets.sync.client import ClientConnection, connect

T = TypeVar("T")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",  # Chromium refuses to start as root with its sandbox
    "--disable-gpu",
    "--use-angle=swiftshader",  # WebGL without a graphics card
    "--enable-unsafe-swiftshader",
    "--disable-dev-shm-usage",  # containers often have a tiny /dev/shm
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-crash-reporter",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """Path of an installed Chromium or Chrome: ``$CHROMIUM``, or the first usual name on the path."""
    names = (os.environ["CHROMIUM"],) if "CHROMIUM" in os.environ else NAMES
    return next(filter(None, map(shutil.which, names)), None)


def wait_until(probe: Callable[[], T], timeout: float, what: str, every: float = 0.1) -> T:
    """Calls ``probe`` until it gives something true, which is returned.

    Raises:
        AssertionError: not within ``timeout`` seconds; names ``what`` and what the probe gave last.
    """
    end = time.monotonic() + timeout
    while not (value := probe()):
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {timeout:g} s; last seen {value!r}")
        time.sleep(every)
    return value


class Browser:
    """One Chromium with one page; a context manager, which leaves no process and no file behind.

    Args:
        executable: path of Chromium.
        width, height: size of the page in pixels.
    """

    def __init__(self, executable: str, width: int = 800, height: int = 600) -> None:
        self.console: list[str] = []
        """What the page wrote to the console, and its uncaught exceptions, as ``level: text``."""
        self._ids = itertools.count(1)
        self._executable = executable
        self._size = (width, height)
        self._session: str | None = None

    def __enter__(self) -> Browser:
        self._profile = Path(tempfile.mkdtemp(prefix="chromium-"))
        self._log = (self._profile / "log").open("w+b")
        self._process = subprocess.Popen(
            [
                self._executable,
                *FLAGS,
                f"--user-data-dir={self._profile}",
                f"--window-size={self._size[0]},{self._size[1]}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(self._profile)},
            start_new_session=True,  # a process group of its own, so that the whole of it can be ended
        )
        try:
            self._socket = self._connect()
            width, height = self._size
            target = self.command("Target.createTarget", url="about:blank")["targetId"]
            attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.command(f"{domain}.enable")
            self.command(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _connect(self) -> ClientConnection:
        port_file = self._profile / "DevToolsActivePort"

        def endpoint() -> list[str] | None:
            if self._process.poll() is not None:
                raise AssertionError(f"{self._executable} ended with {self._process.returncode}:\n{self._output()}")
            lines = port_file.read_text().split() if port_file.exists() else []
            return lines if len(lines) == 2 else None

        port, path = wait_until(endpoint, 60, f"{self._executable} opening its DevTools port")  # type: ignore[misc]
        return connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None, open_timeout=30)

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]

    def _end(self) -> None:
        try:
            if hasattr(self, "_socket"):
                self._socket.close()
        finally:
            end_group(self._process)
            self._log.close()
            shutil.rmtree(self._profile, ignore_errors=True)

    # The protocol -----------------------------------------------------------------------------------------------

    def command(self, method: str, timeout: float = 60, **parameters: Any) -> dict[str, Any]:
        """Sends one DevTools command and returns its result; events that arrive meanwhile are noted.

        Raises:
            AssertionError: Chromium answers with an error.
            TimeoutError: no answer within ``timeout`` seconds.
        """
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        end = time.monotonic() + timeout
        while True:
            answer = json.loads(self._socket.recv(timeout=max(0.0, end - time.monotonic())))
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            words = (str(a.get("value", a.get("description", ""))) for a in parameters["args"])
            self.console.append(f"{parameters['type']}: {' '.join(words)}")
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.console.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
        elif method == "Log.entryAdded":
            entry = parameters["entry"]
            self.console.append(f"{entry['level']}: {entry['text']} ({entry.get('url', '')})")

    # The page ---------------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Goes to ``url`` and waits until it is loaded. Carets are hidden: they blink, and no picture would be final.

        Raises:
            AssertionError: the page cannot be reached or does not load within 60 s.
        """
        result = self.command("Page.navigate", url=url)
        if "errorText" in result:
            raise AssertionError(f"{url}: {result['errorText']}")
        wait_until(lambda: self.evaluate("document.readyState") == "complete", 60, f"loading {url}")
        self.evaluate(
            """{
                const style = document.createElement("style");
                style.textContent = "* { caret-color: transparent !important }";
                document.head.append(style);
            }"""
        )

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page (a JSON value).

        Raises:
            AssertionError: the expression throws.
        """
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def text(self) -> str:
        """The text that the page shows."""
        return self.evaluate("document.body ? document.body.innerText : ''")

    def click(self, label: str, timeout: float = 30) -> None:
        """Clicks, with the mouse, on the button or tab with this text, as soon as it is at rest and uncovered."""
        self._press("button", f"element.innerText.trim() === {json.dumps(label)}", f"a button '{label}'", timeout)

    def choose(self, value: str, option: str, timeout: float = 30) -> None:
        """Opens the drop-down list that shows ``value`` and clicks on one of its options."""
        self._press("input", f"element.value === {json.dumps(value)}", f"a list that shows '{value}'", timeout)
        chosen = f"element.innerText.trim() === {json.dumps(option)}"
        self._press('[role="option"]', chosen, f"an option '{option}'", timeout)

    def _press(self, selector: str, condition: str, what: str, timeout: float) -> None:
        find = f"""(() => {{
            for (const element of document.querySelectorAll({json.dumps(selector)})) {{
                if (!({condition})) continue;
                element.scrollIntoView({{block: "nearest"}});
                const box = element.getBoundingClientRect();
                const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
                if (element.contains(document.elementFromPoint(x, y))) return [x, y];
            }}
            return null;
        }})()"""
        seen: list[Any] = [None]

        def place() -> list[float] | None:
            seen.append(self.evaluate(find))
            return seen[-1] if seen[-1] == seen[-2] else None  # panels slide in: wait until it has stopped

        x, y = wait_until(place, timeout, f"{what} that can be clicked")  # type: ignore[misc]
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def screenshot(self, path: Path | None = None) -> np.ndarray:
        """What the page looks like, ``[H, W, 3]`` uint8; also written to ``path`` as PNG."""
        png = base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])
        if path is not None:
            path.write_bytes(png)
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def end_group(process: subprocess.Popen, patience: float = 5) -> None:
    """Ends a process that was started with ``start_new_session`` and its whole group, by force if it must be."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:  # all of it is gone
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait(patience)
