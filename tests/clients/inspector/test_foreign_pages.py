"""Pages of another origin in a real browser: they reach nothing, and change nothing."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.clients.browser import CHROMIUM, Page, browsing
from tests.support.servers import Server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
STEP = {
    "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [3]}],
    "parameters": {"sequence_id": 5, "sequence_start": True},
}


@pytest.fixture(scope="module")
def foreign_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Return a browser of its own: refused requests are errors in the console of other tests."""
    with browsing("about:blank", tmp_path_factory.mktemp("profile")) as page:
        yield page


def test_rebound_name_gets_no_answer(foreign_browser: Page, tiny_server: Server) -> None:
    foreign_browser.call("Page.navigate", url=tiny_server.address.replace("127.0.0.1", "service.test") + "/models")
    foreign_browser.wait_for("location.hostname === 'service.test' && document.readyState === 'complete'")
    assert "allowed_hosts" in foreign_browser.evaluate("document.body.innerText")
    assert foreign_browser.evaluate("fetch('/livez').then(answer => answer.status)") == 421


def test_foreign_page_starts_no_sequence(foreign_browser: Page, inspected: Server, tiny_server: Server) -> None:
    """The page at 127.0.0.1:PORT is of the same site, and of another origin."""
    path = f"{tiny_server.address}/v2/models/gpt/infer"
    foreign_browser.call("Page.navigate", url=f"{inspected.address}/livez")
    foreign_browser.wait_for(f"location.href === '{inspected.address}/livez' && document.readyState === 'complete'")
    form = f"""(async () => {{
        const kind = {{type: 'application/x-www-form-urlencoded'}};
        const body = new Blob([{json.dumps(json.dumps(STEP))}], kind);
        return (await fetch({json.dumps(path)}, {{method: 'POST', mode: 'no-cors', body}})).type;
    }})()"""
    assert foreign_browser.evaluate(form) == "opaque"
    running = STEP | {"parameters": {"sequence_id": 5}}
    answer = httpx.post(path, json=running, timeout=60)
    assert (answer.status_code, "does not run" in answer.text) == (400, True)
