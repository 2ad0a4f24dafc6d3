"""A headless Chromium that opens pages from disk, driven over a pipe in the words of the Chrome DevTools Protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from limits import limit

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
WITHOUT = "Chromium is not installed (apt-get install chromium)"
KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35}
FLAGS = (
    "--headless", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip


class Browser:
    """A browser with one page. `errors` are what its scripts throw and its console says, `requests` its URLs."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers, self._left = to, answers, b""
        self._number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(
            self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        """The next answer or event."""
        while b"\0" not in self._left:
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has gone"
            self._left += more
        message, self._left = self._left.split(b"\0", 1)
        event = json.loads(message)
        given = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(given["exceptionDetails"])[:2000])
        elif event.get("method") == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        event.setdefault("method", "")
        return event

    def open(self, page: Path | str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file or an address, and waits until it is loaded."""
        self.size(width, height)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._next()["method"] != "Page.loadEventFired":
            pass
        self.settle()

    def size(self, width: int, height: int) -> None:
        """Sets the size of the window; below 600 pixels it is a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def settle(self) -> None:
        """Waits until observers have run and what they asked for is drawn."""
        self.run(
            "new Promise((done) => { let left = 6;"
            " const next = () => (left-- ? requestAnimationFrame(next) : done(1)); next(); })"
        )

    def run(self, script: str) -> Any:
        """The value of an expression, awaited.

        Raises:
            AssertionError: It throws.
        """
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Waits until an expression is true.

        Raises:
            AssertionError: It is not within `limit(60)` seconds.
        """
        look = f"({script}) ? done(true) : performance.now() > end ? done(false) : requestAnimationFrame(look)"
        assert self.run(
            f"new Promise((done) => {{ const end = performance.now() + {1000 * limit(60)};"
            f" const look = () => ({look}); look(); }})"
        ), f"never true: {script}"

    def press(self, key: str, times: int = 1) -> None:
        """Presses a key as a user does."""
        for _ in range(times):
            code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            text = {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def picture(self, path: Path, whole: bool = False, clip: dict[str, float] | None = None) -> None:
        """Saves a PNG of the window, of the whole page, or of the rectangle `clip` of the page."""
        if whole:
            height = min(12000, self.run("document.documentElement.scrollHeight"))
            self.size(self.run("innerWidth"), height)
            self.settle()
        own = {"clip": clip, "captureBeyondViewport": True} if clip else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **own)["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser whose profile lies in an empty folder; it and its processes end with the block."""
    assert CHROMIUM
    theirs, ours = os.pipe(), os.pipe()  # they read 3, and write 4
    words = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
    script = f'exec 3<&{theirs[0]} 4>&{ours[1]}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *words],
        pass_fds=(theirs[0], ours[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs[0])
    os.close(ours[1])
    try:
        yield Browser(theirs[1], ours[0])
    finally:
        family = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
        for member in family:
            member.kill()
        process.wait(limit(30))
        os.close(theirs[1])
        os.close(ours[0])
