"""Headless Chromium, driven by the DevTools protocol over a pair of pipes. Debian's package `chromium` has it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
MISSING = "Chromium is not installed (Debian's package chromium)"
TIMEOUT_S = 180.0  # of a command, and of a condition in the page
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and writes to 4.
_EXEC = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])"""


class Browser:
    """One process of Chromium. `profile`: an empty directory."""

    def __init__(self, profile: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [sys.executable, "-c", _EXEC, str(theirs_in), str(theirs_out), CHROMIUM, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb")
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        rest = b""
        while part := self._in.read1(1 << 16):
            *messages, rest = (rest + part).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]].put(message)
                else:
                    self.events.append(message)
        for answer in list(self._answers.values()):
            answer.put({"error": {"message": "Chromium has ended"}})

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Run a command of the DevTools protocol and return its result."""
        number = next(self._numbers)
        self._answers[number] = queue.SimpleQueue()
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        self._out.write(json.dumps(message).encode() + b"\0")
        answer = self._answers[number].get(timeout=TIMEOUT_S)
        del self._answers[number]
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, **size: Any) -> Page:
        """Open a page in a context of its own, without the storage of other pages."""
        return Page(self, url, **size)

    def close(self) -> None:
        with suppress(AssertionError):  # it may end before it answers
            self.call("Browser.close")
        self._process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        self._out.close()
        self._in.close()


class Page:
    """A tab."""

    def __init__(self, browser: Browser, url: str, *, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self._context)
        attached = browser.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        is_phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        self.prefer(dark)
        self.go(url)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def prefer(self, dark: bool) -> None:
        """Prefer dark or light colours."""
        wanted = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def reload(self) -> None:
        self.evaluate("window.isOld = true")
        self.call("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of the promise that it returns."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Return when the condition holds in the page, also after it has been replaced by another one.

        A condition that throws, for example because its element does not exist yet, does not hold.
        """
        watch = (
            "new Promise((resolve) => { const end = Date.now() + 2000;"
            f"const holds = () => {{ try {{ return ({condition}); }} catch {{ return false; }} }};"
            "const look = () => holds() ? resolve(true) : Date.now() > end ? resolve(false) : setTimeout(look, 20);"
            "look(); })"
        )
        params = {"expression": watch, "awaitPromise": True, "returnByValue": True}
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            answer = self._try("Runtime.evaluate", params)
            if answer.get("result", {}).get("value") is True:
                return
            time.sleep(0.02)  # while a page is being replaced commands fail at once
        raise AssertionError(f"{condition} did not become true:\n{self.evaluate('document.body.innerText')}")

    def _try(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._browser.call(method, self._session, **params)
        except AssertionError:  # the page was replaced meanwhile
            return {}

    def type(self, selector: str, text: str) -> None:
        """Focus an element and type a text into it."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def hover(self, selector: str) -> None:
        """Move the pointer to the middle of an element."""
        place = self.evaluate(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    def text(self, selector: str) -> str:
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[str]:
        """Exceptions and violations of the page's policy so far. Refused requests are no problem of the page."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                found.append(str(details.get("exception", details)))
            elif event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["source"] != "network" and entry["level"] == "error":
                    found.append(entry["text"])
        return found

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)
