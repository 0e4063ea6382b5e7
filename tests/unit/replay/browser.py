"""A headless Chromium driven over its debugging pipe: enough to open a page, press a key and read what is shown."""

from __future__ import annotations

import itertools
import json
import os
import select
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echo_bus.clock import Deadline

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_WAIT_S = 30.0
_AT_ONCE = 1 << 16


def find_browser() -> str | None:
    """`ECHO_CHROMIUM`, or one on the path."""
    return os.environ.get("ECHO_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """One page. Messages are JSON with a zero byte behind each (Chrome DevTools Protocol over a pipe)."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""

    def attach(self) -> None:
        """Open an empty page."""
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, url: str) -> None:
        """Go there."""
        self.tell("Page.navigate", url=url)

    def resize(self, width: int, height: int = 900) -> None:
        """As a screen of so many pixels would show it."""
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def press(self, key: str) -> None:
        """A key, by its name in the DOM."""
        for kind in ("keyDown", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, key=key)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self.tell("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until it is true. Raises AssertionError."""
        deadline = Deadline.after(_WAIT_S)
        while not self.evaluate(expression):
            assert not deadline.expired(), f"waited for {expression}; the page shows {self.evaluate('document.body.innerText')!r}"

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command and its result."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0")
        deadline = Deadline.after(_WAIT_S)
        while True:
            while b"\0" not in self._buffer:
                assert select.select([self._answers], [], [], deadline.remaining_s())[0], f"waited for the answer to {method}"
                self._buffer += os.read(self._answers, _AT_ONCE)
            message, _, self._buffer = self._buffer.partition(b"\0")
            said = json.loads(message)
            if said.get("id") == number:
                assert "error" not in said, said["error"]
                result: dict[str, Any] = said["result"]
                return result


@contextmanager
def opened(browser: str, profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, which ends with it."""
    (inside, commands), (answers, outside) = os.pipe(), os.pipe()
    command = shlex.join([browser, *_OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={profile}"])
    # Chromium reads commands from descriptor 3 and writes answers to 4.
    shell = f"exec {command} 3<&{inside} 4>&{outside}"
    process = subprocess.Popen(["/bin/bash", "-c", shell], pass_fds=(inside, outside), stderr=subprocess.DEVNULL)
    try:
        os.close(inside)
        os.close(outside)
        page = Page(commands, answers)
        page.attach()
        yield page
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
