"""A headless Chromium, driven by its own protocol."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.support.waiting import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Page:
    """An open page."""

    connection: ClientConnection
    session: str = ""
    sent: int = field(default=0)
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events of the enabled domains, in the order of their arrival."""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result; events on the way are kept."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": parameters}
        self.connection.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            answer: dict[str, Any] = json.loads(self.connection.recv(timeout=60))
            if answer.get("id") == self.sent:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, awaited; raises AssertionError where it throws."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]["exception"]["description"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        wait_until(lambda: self.evaluate(f"!!({condition})"), 60, 0.05)


@contextmanager
def browsing(address: str, profile: Path) -> Iterator[Page]:
    """Open `address` in a browser of its own, with its files in `profile`."""
    assert CHROMIUM is not None
    arguments = [
        "--headless=new",
        "--no-sandbox",  # containers and root do not allow a sandbox
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--host-resolver-rules=MAP service.test 127.0.0.1",  # an address without the rights of localhost
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    with subprocess.Popen([CHROMIUM, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            file = profile / "DevToolsActivePort"
            wait_until(lambda: file.exists() and len(file.read_text().splitlines()) == 2, 60, 0.05)
            port, path = file.read_text().splitlines()
            with connect(f"ws://127.0.0.1:{port}{path}", max_size=2**26) as connection:
                page = Page(connection)
                target = page.call("Target.createTarget", url=address)["targetId"]
                page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
                page.wait_for(f"document.readyState + location.href === {json.dumps(f'complete{address}')}")
                yield page
        finally:
            process.terminate()
            process.wait(30)
