"""The interactive documentation in a real browser, on a server with keys."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.clients.browser import CHROMIUM, Page, browsing
from tests.support.servers import serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
KEY = "a key of the test"
OPERATION = "#operations-models-list_models"
ENTER = """(key => {
    const input = document.querySelector(".auth-container input")
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(input, key)
    input.dispatchEvent(new Event("input", {bubbles: true}))
})"""
"""Types into an input of React."""


def click(page: Page, selector: str) -> None:
    """Click an element once it is there."""
    wait_until(lambda: bool(page.evaluate(f"!!document.querySelector('{selector}')")))
    page.evaluate(f"document.querySelector('{selector}').click()")


def execute(page: Page) -> str:
    """Execute the shown operation, and return the status in the page."""
    status = f"{OPERATION} .live-responses-table .response-col_status"
    click(page, f"{OPERATION} button.execute")
    shown: list[Any] = []

    def is_shown() -> bool:
        shown[:] = [page.evaluate(f"document.querySelector('{status}:not(.col_header)')?.innerText")]
        return bool(shown[0]) and shown[0].strip()[:3].isdigit()

    wait_until(is_shown)
    return str(shown[0]).strip()[:3]


def test_interactive_docs_request_succeeds_after_authorization(tiny_repository: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "test"\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\n')
    with (
        serve(tiny_repository, "--api-keys-file", str(keys)) as server,
        browsing(f"{server.address}/docs", tmp_path / "profile") as page,
    ):
        click(page, f"{OPERATION} .opblock-summary-control")
        click(page, f"{OPERATION} .try-out__btn")
        assert execute(page) == "401"
        click(page, f"{OPERATION} .btn-clear")
        click(page, ".scheme-container button.authorize")
        wait_until(lambda: bool(page.evaluate("!!document.querySelector('.auth-container input')")))
        page.evaluate(f"{ENTER}({KEY!r})")
        click(page, ".auth-container button.authorize")
        click(page, ".auth-container button.btn-done")
        assert execute(page) == "200"
