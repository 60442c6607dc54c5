"""The snippets of the inspector in a real browser: they are copied, and they run."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.clients.browser import CHROMIUM, Page
from tests.clients.inspector.controls import choose, embed, load, text
from tests.support.paths import ROOT
from tests.support.servers import Server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.mark.parametrize("host", ["127.0.0.1", "service.test"])
def test_copy_buttons_copy_at_any_address(host: str, browser: Page, inspected: Server) -> None:
    load(browser, replace(inspected, address=inspected.address.replace("127.0.0.1", host)))
    browser.wait_for("document.getElementById('version').value")
    assert browser.evaluate("isSecureContext") == (host == "127.0.0.1")
    embed(browser)
    for button, source in (("#copy", "#snippet"), ("#facts button", ".identity")):
        click = f"document.querySelector('{button}').click()"
        browser.call("Runtime.evaluate", expression=click, userGesture=True)
        browser.wait_for(f"document.querySelector('{button}').innerText === 'Copied'")
        copied = browser.evaluate(f"document.querySelector('{source}').textContent")
        browser.evaluate("document.getElementById('content').select() ?? document.getElementById('content').focus()")
        browser.call("Input.dispatchKeyEvent", type="keyDown", commands=["paste"])
        browser.wait_for(f"document.getElementById('content').value === {json.dumps(copied)}")


@pytest.mark.parametrize("language", ["curl", "python"])
def test_snippet_of_embed_panel_runs(language: str, page: Page) -> None:
    choose(page, "gpt")
    embed(page)
    page.evaluate(f"document.querySelector('[data-language={language}]').click()")
    code = text(page, "snippet")
    command = ["bash", "-c", code] if language == "curl" else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert '"shape":[1,4,4]' in done.stdout if language == "curl" else done.stdout.startswith("(1, 4, 4) [")
