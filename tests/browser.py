"""A headless Chromium, driven over the plain WebDriver protocol.

python tests/browser.py PAGE.html FOLDER takes the pictures of a report that the README shows.
"""

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage",
)  # fmt: skip
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def missing() -> str:
    """Why there is no browser here; empty where there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed (Debian: chromium, chromium-driver)" if absent else ""


class Browser:
    """One window. Everything it asks the network for is in `requests`."""

    def __init__(self) -> None:
        self.profile = tempfile.mkdtemp(prefix="qupel-chromium-")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.root = f"http://127.0.0.1:{port}"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        home = {**os.environ, "HOME": self.profile, "XDG_CONFIG_HOME": self.profile, "XDG_CACHE_HOME": self.profile}
        self.driver = subprocess.Popen([shutil.which("chromedriver") or "", f"--port={port}"], env=home, **quiet)
        self.session = ""
        try:
            self._wait()
            options = {"args": [*FLAGS, f"--user-data-dir={self.profile}"], "binary": shutil.which("chromium")}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}
            found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self.session = f"/session/{found['sessionId']}"
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        for _ in range(300):
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise RuntimeError("chromedriver does not answer")

    def _call(self, verb: str, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"}, method=verb)
        try:
            with DIRECT.open(request, timeout=120) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as e:
            raise RuntimeError(json.loads(e.read())["value"]["message"]) from None

    def _post(self, path: str, body: dict):
        return self._call("POST", self.session + path, body)

    def cdp(self, command: str, **parameters):
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, page: Path | str, width: int = 1100, height: int = 800, dark: bool = False) -> None:
        """Show a file or an address in a window of this size, in the light or the dark theme."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[theme])
        self._post("/url", {"url": "about:blank"})
        for kind in ("performance", "browser"):
            self.logs(kind)  # forget those of the page before
        self._post("/url", {"url": page if isinstance(page, str) else page.resolve().as_uri()})
        # figures are drawn when their size is known, with the first frame
        self.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str, *arguments):
        """The value of a function body in the page."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def move(self, x: float, y: float) -> None:
        """Put the pointer there, in pixels of the window."""
        at = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        self._post("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [at]}]})

    def click(self, selector: str) -> None:
        found = self._post("/element", {"using": "css selector", "value": selector})
        (element,) = found.values()
        self._post(f"/element/{element}/click", {})

    def press(self, *keys: str) -> None:
        """Type keys, by their WebDriver code points or characters."""
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def logs(self, kind: str) -> list[dict]:
        return self._post("/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """The addresses the page has asked for since it was opened."""
        told = (json.loads(entry["message"])["message"] for entry in self.logs("performance"))
        return [m["params"]["request"]["url"] for m in told if m["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path | None = None, whole: bool = False) -> bytes:
        more = {"captureBeyondViewport": True} if whole else {}
        if whole:
            size = self.run("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
            more["clip"] = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        png = base64.b64decode(self.cdp("Page.captureScreenshot", format="png", **more)["data"])
        if path is not None:
            path.write_bytes(png)
        return png

    def close(self) -> None:
        try:
            if self.session:
                self._call("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait(20)
            shutil.rmtree(self.profile, ignore_errors=True)


def pictures(page: Path, folder: Path) -> None:
    """The table and the curves, weights and centers in dark, the curves on a phone with the values of a point."""
    curves = "document.querySelector('#accuracy svg').scrollIntoView({block: 'center'})"
    views = (
        ("table", {"width": 1180, "height": 1130}, "window.scrollTo(0, 0)"),
        ("dark", {"width": 700, "height": 620, "dark": True}, "document.querySelector('#weights').scrollIntoView()"),
        ("phone", {"width": 390, "height": 620}, curves),
    )
    window = Browser()
    try:
        for name, size, script in views:
            window.open(page, **size)
            window.run(script)
            if script == curves:
                where = (
                    "const r = [...document.querySelectorAll('#accuracy circle.dot')].at(-2).getBoundingClientRect();"
                )
                window.move(*window.run(f"{where} return [r.left, r.top]"))
            window.screenshot(folder / f"report-{name}.png")
            print(f"{folder / f'report-{name}.png'}: {(folder / f'report-{name}.png').stat().st_size / 1000:.0f} kB")
    finally:
        window.close()


if __name__ == "__main__":
    pictures(Path(sys.argv[1]), Path(sys.argv[2]))
