"""The inspector in a browser: its controls, as a person uses them, and checks of the whole page."""

import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.clients.browser import Page
from tests.support.paths import ROOT
from tests.support.servers import Server

AXE = ROOT / "tests/clients/accessibility/node_modules/axe-core/axe.min.js"
PANELS = ("overview", "identity", "embed", "neighbours", "positions", "decode")


def text(page: Page, name: str) -> str:
    """Return the words of an element."""
    return str(page.evaluate(f"document.getElementById('{name}').innerText"))


def fill(page: Page, **values: object) -> None:
    """Set the values of inputs by their ids, as a person does; a dash of an id is an underscore here.

    A value and its events are one script: an answer that arrives between them could set the value back.
    """
    for name, value in values.items():
        field = f"document.getElementById('{name.replace('_', '-')}')"
        sent = f"for (const kind of ['input', 'change']) {field}.dispatchEvent(new Event(kind))"
        page.evaluate(f"{field}.value = {json.dumps(value)}; {sent}")


def submit(page: Page, form: str) -> None:
    page.evaluate(f"document.getElementById('{form}-form').requestSubmit()")


def wait_for_text(page: Page, name: str, words: str = "") -> str:
    """Wait until an element has the words, or any; return all of its words."""
    page.wait_for(f"document.getElementById('{name}').innerText.trim().includes({json.dumps(words)})")
    page.wait_for(f"document.getElementById('{name}').innerText")
    return text(page, name)


def wait_for_view(page: Page, name: str) -> None:
    """Wait until an element is not hidden."""
    page.wait_for(f"!document.getElementById('{name}').hidden")


def choose(page: Page, model: str) -> None:
    """Open a model, unless it is open: a browser sends no event for a choice that changes nothing."""
    if page.evaluate("document.getElementById('model').value") != model:
        fill(page, model=model)
    page.wait_for(f"document.getElementById('status').innerText.startsWith('{model}')")


def choose_version(page: Page, model: str, version: int) -> None:
    choose(page, model)
    fill(page, version=str(version))
    wait_for_text(page, "status", f"{model}, version {version}")


def embed(page: Page, **values: str) -> None:
    """Fill the panel, and wait for the vectors."""
    fill(page, **values)
    submit(page, "embed")
    wait_for_view(page, "embed-result")
    assert text(page, "embed-error") == ""


def resize(page: Page, width: int, scheme: str = "light") -> None:
    """Show the page in a width and a scheme of colours, and wait until it is drawn. The next page has its own again."""
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.call("Emulation.setScrollbarsHidden", hidden=True)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def load(page: Page, server: Server, path: str = "/") -> None:
    """Open the page, and record its events."""
    for domain in ("Page", "Runtime", "Network", "Log"):
        page.call(f"{domain}.enable")
    page.call("Page.navigate", url=server.address + path, transitionType="typed")
    page.wait_for("document.readyState === 'complete' && document.getElementById('model')")


def check_events(page: Page, server: Server, allowed: tuple[int, ...] = ()) -> None:
    """Fail for an error of the console, and for a request to another origin; `allowed` are statuses of the API."""
    page.evaluate("1")  # the events before it have arrived
    for event in page.events:
        found = event["params"]
        if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            raise AssertionError(event)
        if event["method"] == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            assert any(f"status of {status}" in found["entry"]["text"] for status in allowed), event
        if event["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
            address = urlsplit(found["request"]["url"] if "request" in found else found["url"])
            assert address.netloc == urlsplit(server.address).netloc, event


def check_accessibility(page: Page) -> None:
    """Fail for a serious finding of axe-core."""
    if not AXE.is_file():
        pytest.skip("no axe-core: npm ci --ignore-scripts in tests/clients/accessibility")
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run().then(({violations}) => violations)")
    assert not [finding for finding in found if finding["impact"] in ("serious", "critical")], found


def count_colours(page: Page, name: str) -> int:
    """Return the number of different colours in a picture."""
    picture = f"document.getElementById('{name}')"
    data = f"{picture}.getContext('2d').getImageData(0, 0, {picture}.width, {picture}.height).data.buffer"
    return int(page.evaluate(f"new Set(new Uint32Array({data})).size"))


def ticks(page: Page, picture: str, axis: str) -> Any:
    """Return the words beside a picture: the name of the axis `down` or `across`, and its numbers."""
    words = f"document.getElementById('{picture}').parentElement.querySelectorAll('.{axis} :is(.name, .tick)')"
    return page.evaluate(f"Array.from({words}, (word) => word.innerText)")


def cells(page: Page, name: str) -> Any:
    """Return the words of a table, row by row."""
    return page.evaluate(f"""Array.from(document.querySelectorAll("#{name} tr"), (row) =>
        Array.from(row.cells, (cell) => cell.innerText))""")


def use_stream(page: Page) -> None:
    """Step, rewind, reorder, and fail; then close."""
    fill(page, rows="2", open_offset="1")
    submit(page, "open")
    wait_for_view(page, "stream")
    for form, field, given, offsets in (
        ("step", "step_ids", "5, 6; 2", "[3, 2]"),
        ("rewind", "rewind", "2, 2", "[2, 2]"),
        ("reorder", "reorder", "1, 1, 0", "[2, 2, 2]"),
        ("step", "step_ids", "1; ; 3, 4", "[3, 2, 4]"),
    ):
        fill(page, **{field: given})
        submit(page, form)
        page.wait_for(f"document.querySelector('#messages td + td')?.innerText === '{offsets}'")
    found = cells(page, "messages")
    assert [row[0].split()[0] for row in found] == ["step", "reorder", "rewind", "step"]
    assert len(found[-1][3].split(", ")) == 3
    rows = page.evaluate("Array.from(document.getElementById('stream-rows').children, (row) => row.innerText)")
    assert [row.split(": ")[0] for row in rows] == ["offset 3", "offset 2", "offset 4"]
    assert [list(row.split(": ")[1]) for row in rows] == [["2", "1"], ["2"], ["5", "3", "4"]]
    for form, field, given, words in (
        ("rewind", "rewind", "9", "9"),
        ("step", "step_ids", ";;", "input_ids"),
    ):
        fill(page, **{field: given})
        submit(page, form)
        wait_for_text(page, "decode-error", words)
    assert len(cells(page, "messages")) == 4
    page.evaluate("document.getElementById('close').click()")
    page.wait_for("document.getElementById('stream').hidden")


def press(page: Page, key: str, code: int) -> None:
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
