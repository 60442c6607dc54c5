"""The interactive documentation in a real browser, on a server with keys."""

from pathlib import Path

import pytest

from preblock.service.core.auth import new_key
from tests.clients.browser import CHROMIUM, Page, browsing
from tests.support.servers import serve

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
OPERATION = "#operations-models-list_models"
ENTER = """(key => {
    const input = document.querySelector(".auth-container input")
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(input, key)
    input.dispatchEvent(new Event("input", {bubbles: true}))
})"""
"""Types into an input of React."""


def click(page: Page, selector: str) -> None:
    """Click an element once it is there."""
    page.wait_for(f"document.querySelector('{selector}')")
    page.evaluate(f"document.querySelector('{selector}').click()")


def execute(page: Page) -> str:
    """Execute the shown operation, and return the status in the page."""
    selector = f"{OPERATION} .live-responses-table .response-col_status:not(.col_header)"
    status = f"document.querySelector('{selector}')?.innerText.trim().slice(0, 3)"
    click(page, f"{OPERATION} button.execute")
    page.wait_for(f"Number({status})")
    return str(page.evaluate(status))


def test_interactive_docs_request_succeeds_after_authorization(tiny_repository: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    key, entry = new_key("test", (), admin=False)
    keys.write_text(entry)
    with (
        serve(tiny_repository, "--api-keys-file", str(keys)) as server,
        browsing(f"{server.address}/docs", tmp_path / "profile") as page,
    ):
        click(page, f"{OPERATION} .opblock-summary-control")
        click(page, f"{OPERATION} .try-out__btn")
        assert execute(page) == "401"
        click(page, f"{OPERATION} .btn-clear")
        click(page, ".scheme-container button.authorize")
        page.wait_for("document.querySelector('.auth-container input')")
        page.evaluate(f"{ENTER}({key!r})")
        click(page, ".auth-container button.authorize")
        click(page, ".auth-container button.btn-done")
        assert execute(page) == "200"
