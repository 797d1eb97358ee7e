"""A real browser without a window, driven by the WebDriver protocol: Chromium's own driver."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def has_browser() -> bool:
    return bool(DRIVER and CHROMIUM)


needs_browser = pytest.mark.skipif(
    not has_browser(),
    reason="no browser: the page is checked with Chromium and chromedriver on the path",
)


class Browser:
    """One window of Chromium."""

    def __init__(self, address: str, size: tuple[int, int]) -> None:
        self._address = address
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {
            "binary": CHROMIUM,
            "args": [*arguments, "--force-prefers-reduced-motion"],
            "mobileEmulation": {
                "deviceMetrics": {"width": size[0], "height": size[1], "pixelRatio": 1}
            },
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        body = {"capabilities": {"alwaysMatch": wanted}}
        self._session = self._call("POST", "/session", body)["sessionId"]

    def open(self, page: Path) -> None:
        self._post("url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the value of a script's ``return``."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, condition: str, *, seconds: float = 60) -> Any:
        """Return the first true value of an expression, or fail."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {condition}")):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.05)
        return value

    def press(self, keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def click(self, selector: str) -> None:
        found = self._post("element", {"using": "css selector", "value": selector})
        self._post(f"element/{next(iter(found.values()))}/click", {})

    def save_picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        wanted = {"captureBeyondViewport": True, "format": "png"}
        body = {"cmd": "Page.captureScreenshot", "params": wanted}
        path.write_bytes(base64.b64decode(self._post("goog/cdp/execute", body)["data"]))

    def errors(self) -> list[str]:
        """Return what the browser complained about since the last call."""
        entries = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self._call("DELETE", f"/session/{self._session}", None)

    def _post(self, name: str, body: dict[str, Any]) -> Any:
        return self._call("POST", f"/session/{self._session}/{name}", body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]


@contextmanager
def browsing(size: tuple[int, int] = (1280, 900)) -> Iterator[Browser]:
    """Start a driver and a window of this size, and end both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert DRIVER is not None
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        _wait_for_driver(f"http://127.0.0.1:{port}/status")
        browser = Browser(f"http://127.0.0.1:{port}", size)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(60)


def _wait_for_driver(status: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(status, timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    pytest.fail("chromedriver did not start")
