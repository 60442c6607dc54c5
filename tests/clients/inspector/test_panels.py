"""The inspector in a real browser: every panel is used, with the values of NumPy and the words of the API."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

import preblock
from preblock.service.core.auth import new_key
from tests.clients.browser import CHROMIUM, Page
from tests.clients.inspector.controls import (
    PANELS,
    check_events,
    choose,
    fill,
    load,
    pixels,
    submit,
    text,
    ticks,
    use_stream,
)
from tests.support.artifacts import copy_artifact, read_tables
from tests.support.servers import Server, serve

MAX_LOADED_BYTES = 150_000
ROTARY = {"rotary_cos", "rotary_sin", "rotary_cos_near", "rotary_sin_near"}
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


def test_first_view_stays_small_and_same_origin(page: Page, inspected: Server) -> None:
    assert page.evaluate("location.pathname") == "/inspect"
    page.wait_for("!document.getElementById('positions-result').hidden")
    check_events(page, inspected)
    data = {
        event["params"]["requestId"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent" and "/positions" in event["params"]["request"]["url"]
    }
    loaded = [event["params"] for event in page.events if event["method"] == "Network.loadingFinished"]
    assert sum(part["encodedDataLength"] for part in loaded if part["requestId"] not in data) <= MAX_LOADED_BYTES
    assert len(loaded) > len(data)


def test_page_has_every_panel_with_heading(page: Page) -> None:
    choose(page, "gpt")
    found = page.evaluate("""Array.from(document.querySelectorAll("main section"), (section) =>
        [section.id, document.getElementById(section.getAttribute("aria-labelledby")).innerText, section.hidden])""")
    titles = ("Models", "Model", "Embed", "Nearest tokens", "Positions", "Decode")
    assert found == [[name, title, False] for name, title in zip(PANELS, titles, strict=True)]


def test_model_panel_matches_api_description(page: Page, inspected: Server) -> None:
    choose(page, "bert")
    described = httpx.get(f"{inspected.address}/models/bert").json()
    facts = text(page, "facts")
    for expected in (described["identity"], "bert, version 2", "0 to 10", "float32", "token_type_ids 0 to 1"):
        assert expected in facts
    assert f"running {described['provider']}" in facts
    assert page.evaluate("document.querySelector('.identity').clientWidth") < 150
    parity = described["parity"]["providers"]["CPUExecutionProvider"]["outputs"]["embeddings"]
    assert str(len(parity["cases"])) in text(page, "parity")
    fill(page, version="1")
    page.wait_for("document.getElementById('status').innerText === 'bert, version 1'")
    other = httpx.get(f"{inspected.address}/models/bert/versions/1").json()["identity"]
    assert other in text(page, "facts")
    assert other != described["identity"]


def test_random_weights_of_preset_are_shown(page: Page, inspected: Server) -> None:
    choose(page, "t5")
    assert "preset, tiny, random weights" in text(page, "facts")
    shown = page.evaluate("[...document.querySelectorAll('option')].map((option) => option.innerText)")
    assert [line for line in shown if "random weights" in line] == ["t5 (random weights)"]
    assert page.evaluate("[...document.querySelectorAll('#served tr')].map((row) => row.cells[1].innerText)") == [
        "random weights" if model["random_weights"] else "loaded"
        for model in httpx.get(f"{inspected.address}/models").json()
    ]


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("vit", {"embed", "neighbours", "positions", "decode"}),
        ("wordllama", {"positions", "decode"}),
        ("ngrams", {"positions"}),
        ("rotary", set()),
    ],
)
def test_panels_without_content_are_hidden(model: str, missing: set[str], page: Page, inspected: Server) -> None:
    page.evaluate(f"document.querySelector('#served [value={model}]').click()")
    page.wait_for(f"document.getElementById('status').innerText.startsWith('{model}')")
    shown = page.evaluate(f"{list(PANELS)}.filter((name) => document.getElementById(name).checkVisibility())")
    assert shown == [name for name in PANELS if name not in missing]
    links = page.evaluate("[...document.querySelectorAll('nav a:not([hidden])')].map((link) => link.hash)")
    assert links == [*(f"#{name}" for name in shown), ""]
    assert page.evaluate("document.getElementById('model').value") == model
    check_events(page, inspected)


def test_embed_panel_shows_ids_positions_norms_and_values(page: Page, inspected: Server) -> None:
    choose(page, "gpt")
    fill(page, content="5, 6, 1", offset="2")
    submit(page, "embed")
    page.wait_for("!document.getElementById('embed-result').hidden")
    answer = httpx.post(
        f"{inspected.address}/models/gpt/embed", json={"input_ids": [5, 6, 1], "offset": 2, "encoding": "float"}
    ).json()
    rows = page.evaluate("""Array.from(document.querySelectorAll("#vectors tr"), (row) =>
        Array.from(row.cells, (cell) => cell.innerText))""")
    assert [row[1:3] for row in rows] == [["5", "2"], ["6", "3"], ["1", "4"]]
    vectors = np.array(answer["embeddings"][0])
    norms = [float(row[3]) for row in rows]
    assert np.allclose(norms, np.linalg.norm(vectors, axis=1), rtol=1e-3)
    first = [[float(value) for value in row[4].split(", ")[:-1]] for row in rows]
    assert np.allclose(first, vectors[:, :3], rtol=1e-3)
    colours = page.evaluate("""Array.from(document.querySelectorAll("#spans .token"), (token) =>
        getComputedStyle(token).backgroundColor)""")
    assert len(set(colours)) == 3
    times = page.evaluate("""Array.from(document.querySelectorAll("#timings tr"), (row) => [
        row.cells[0].innerText, row.cells[1].innerText, row.querySelector(".bar > *").offsetWidth])""")
    assert [name for name, _, _ in times] == ["parse and check", "queue", "model", "network, page", "total"]
    milliseconds = [float(time.removesuffix(" ms")) for _, time, _ in times]
    widths = [width for _, _, width in times]
    assert np.allclose(np.array(widths) / widths[-1], np.array(milliseconds) / milliseconds[-1], atol=0.02)
    check_events(page, inspected)


@pytest.mark.parametrize("output", ["ngram_embeddings", "ngram_row_ids"])
def test_embed_panel_shows_outputs_of_several_layers(output: str, page: Page, inspected: Server) -> None:
    choose(page, "ngrams")
    fill(page, content="5, 6, 1", output=output)
    submit(page, "embed")
    page.wait_for("!document.getElementById('embed-result').hidden")
    body = {"input_ids": [5, 6, 1], "output": output, "encoding": "float"}
    answer = httpx.post(f"{inspected.address}/models/ngrams/embed", json=body).json()
    rows = page.evaluate("""Array.from(document.querySelectorAll("#vectors tr"), (row) => row.cells[4].innerText)""")
    found = [[float(value) for value in row.split(", ")[:-1]] for row in rows]
    expected = np.array(answer[output][0]).reshape(3, -1)[:, :3]
    assert np.allclose(found, expected, rtol=0 if output == "ngram_row_ids" else 1e-3)
    check_events(page, inspected)


def test_embed_panel_shows_code_for_text(page: Page, inspected: Server) -> None:
    choose(page, "bert")
    fill(page, version="1")
    page.wait_for("document.getElementById('status').innerText === 'bert, version 1'")
    submit(page, "embed")
    page.wait_for("!document.getElementById('embed-result').hidden || document.getElementById('embed-error').innerText")
    assert text(page, "embed-error") == ""
    assert "next offset" in text(page, "embed-words")
    page.wait_for("document.getElementById('spans').innerText.startsWith('[CLS]')")
    assert text(page, "vectors").splitlines()[-1].startswith("[SEP]")
    for language, expected in (("curl", "curl '"), ("python", "preblock.connect("), ("javascript", "await fetch(")):
        page.evaluate(f"document.querySelector('[data-language={language}]').click()")
        assert expected in text(page, "snippet")
        assert f"{inspected.address}" in text(page, "snippet")
        pressed = page.evaluate("document.querySelector('[data-language][aria-pressed=true]').dataset.language")
        assert pressed == language


def test_embed_panel_sends_token_types(page: Page) -> None:
    choose(page, "bert")
    page.evaluate("document.querySelector('[name=input][value=input_ids]').click()")
    fill(page, content="3, 4")
    page.evaluate("document.querySelector('#indices input').value = '0, 1'")
    submit(page, "embed")
    page.wait_for("!document.getElementById('embed-result').hidden")
    rows = "[...document.querySelectorAll('#vectors tr')].map((row) => row.cells[3].innerText)"
    assert (text(page, "columns").split()[3], page.evaluate(rows)) == ("token_type_ids", ["0", "1"])
    page.evaluate("document.querySelector('#indices input').value = '0, 2'")
    submit(page, "embed")
    page.wait_for("document.getElementById('embed-error').innerText")
    assert "token_type_ids[1]: got 2, expected 0 to 1" in text(page, "embed-error")


@pytest.mark.parametrize(
    ("ids", "offset", "message"),
    [
        ("7", "0", "422 Invalid: input_ids[0]: got 7, expected 0 to 6 (request "),
        ("1, 2", "5", "422 Invalid: "),
        ("1", "-1", "422 Invalid: offset"),
        ("one", "0", "input_ids: got one, expected integers"),
        ("", "0", "422 Invalid: "),
    ],
)
def test_embed_panel_shows_api_error_message(
    ids: str, offset: str, message: str, page: Page, inspected: Server
) -> None:
    choose(page, "gpt")
    fill(page, content=ids, offset=offset)
    submit(page, "embed")
    page.wait_for("document.getElementById('embed-error').innerText")
    assert text(page, "embed-error").startswith(message)
    assert page.evaluate("document.getElementById('embed-result').hidden")
    fill(page, offset="")  # the browser itself refuses it, with words of its own
    submit(page, "embed")
    assert text(page, "embed-error") == ""
    check_events(page, inspected, (422,))


def test_position_slider_shows_window_and_limit(page: Page, inspected: Server, tmp_path: Path) -> None:
    choose(page, "gpt")
    fill(page, window="2")
    page.wait_for("document.getElementById('ruler-words').innerText.includes('2 tokens at offset 0 ')")
    assert "positions 0 to 1. max_len is 6, so 4 remain" in text(page, "ruler-words")
    assert text(page, "slider-value") == "0"
    page.wait_for("document.getElementById('heatmap-words').innerText.includes('rows 0 to 5')")
    rows = read_tables(copy_artifact("gpt", tmp_path))["positions"]
    least, most = (float(f"{value:.4g}") for value in (rows.min(), rows.max()))
    assert f"rows 0 to 5, 4 columns, values {least:g} to {most:g}." in text(page, "heatmap-words")
    cosine = rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1])
    assert f"has cosine {float(f'{cosine:.4g}'):g} with the next" in text(page, "similarity-words")
    size = page.evaluate("[document.getElementById('heatmap').width, document.getElementById('heatmap').height]")
    assert size == [4, 6]
    assert [ticks(page, "heatmap", axis) for axis in ("down", "across")] == [
        ["position", *"012345"],
        ["dimension", *"0123"],
    ]
    assert [ticks(page, "similarity", axis) for axis in ("down", "across")] == [
        ["position", *"012345"],
        ["position", *"024"],
    ]
    before = pixels(page, "ruler")
    fill(page, slider="5")
    page.wait_for("document.getElementById('ruler-words').innerText.includes('at offset 5 ')")
    assert "It is refused: 1 are beyond max_len 6." in text(page, "ruler-words")
    assert pixels(page, "ruler") != before
    fill(page, window="65")
    page.wait_for("document.getElementById('positions-error').innerText")
    assert text(page, "positions-error") == "tokens: got 65, expected 1 to 64"
    fill(page, window="1")
    page.wait_for("!document.getElementById('positions-error').innerText")
    check_events(page, inspected)


@pytest.mark.parametrize(("model", "kinds"), [("rotary", ROTARY), ("t5", {"bias"})])
def test_positions_panel_shows_rotary_and_bias_pictures(
    model: str, kinds: set[str], page: Page, inspected: Server
) -> None:
    choose(page, model)
    page.wait_for("!document.getElementById('positions-result').hidden")
    page.wait_for("document.getElementById('heatmap-words').innerText")
    options = page.evaluate("Array.from(document.getElementById('picture').options, (option) => option.value)")
    assert set(options) == kinds
    for kind in kinds:
        fill(page, picture=kind)
        word = "query by key" if kind == "bias" else f"{kind},"
        page.wait_for(f"document.getElementById('heatmap-words').innerText.includes('{word}')")
        assert text(page, "positions-error") == ""
    if model == "rotary":  # these outputs end before the model
        fill(page, picture="rotary_cos_near", slider="15")
        page.wait_for("document.getElementById('ruler-words').innerText.includes('beyond max_len 16')")
    check_events(page, inspected)


def test_decode_panel_streams_over_websocket(page: Page, inspected: Server) -> None:
    choose(page, "gpt")
    use_stream(page)
    assert any(event["method"] == "Network.webSocketCreated" for event in page.events)
    check_events(page, inspected)


def test_decode_panel_shows_error_of_wrong_offset(page: Page) -> None:
    choose(page, "gpt")
    fill(page, open_offset="99")
    submit(page, "open")
    page.wait_for("document.getElementById('decode-error').innerText.includes('99')")


def test_nearest_tokens_match_api(page: Page, inspected: Server) -> None:
    choose(page, "gpt")
    fill(page, token="3", count="4")
    submit(page, "neighbours")
    page.wait_for("document.getElementById('nearest').children.length")
    body = httpx.get(f"{inspected.address}/models/gpt/neighbours?id=3&count=4").json()
    rows = page.evaluate("""Array.from(document.querySelectorAll("#nearest tr"), (row) => [
        Number(row.cells[0].innerText), Number(row.cells[1].innerText), row.querySelector(".bar > *").offsetWidth
        / row.querySelector(".bar").offsetWidth])""")
    assert [row[0] for row in rows] == [entry["id"] for entry in body["neighbours"]]
    cosines = [entry["cosine"] for entry in body["neighbours"]]
    assert np.allclose([row[1] for row in rows], cosines, rtol=1e-3)
    assert np.allclose([row[2] for row in rows], np.maximum(cosines, 0), atol=0.01)
    fill(page, token="99")
    submit(page, "neighbours")
    page.wait_for("document.getElementById('neighbours-error').innerText")
    assert "id: got 99, expected 0 to 6" in text(page, "neighbours-error")
    assert text(page, "nearest") == ""
    fill(page, count="101")  # the browser itself refuses it
    submit(page, "neighbours")
    assert text(page, "neighbours-error") == ""


def test_key_stays_in_memory_and_streams_use_requests(browser: Page, tiny_repository: Path, tmp_path: Path) -> None:
    secret, entry = new_key("alice", (), False)
    keys = tmp_path / "keys.toml"
    keys.write_text(entry)
    keys.chmod(0o600)
    with serve(tiny_repository, "--api-keys-file", str(keys), "--inspector", "on") as server:
        browser.events.clear()
        load(browser, server)
        browser.wait_for("!document.getElementById('key-form').hidden")
        assert text(browser, "status") == "This service needs an API key."
        fill(browser, key="wrong")
        submit(browser, "key")
        browser.wait_for("document.getElementById('status').innerText.startsWith('401 ')")
        fill(browser, key=secret)
        submit(browser, "key")
        browser.wait_for("document.getElementById('version').value")
        assert browser.evaluate("document.getElementById('key-form').hidden")
        choose(browser, "gpt")
        use_stream(browser)
        submit(browser, "embed")
        browser.wait_for("!document.getElementById('embed-result').hidden")
        assert "$API_KEY" in text(browser, "snippet")
        assert secret not in browser.evaluate("document.documentElement.outerHTML")
        stored = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert secret not in browser.evaluate(stored)
        assert browser.evaluate("document.getElementById('key').value") == ""
        assert not [event for event in browser.events if event["method"] == "Network.webSocketCreated"]
        check_events(browser, server, (401, 422))


def test_page_without_models_shows_no_panel(browser: Page, tmp_path: Path) -> None:
    copy_artifact("gpt", tmp_path)
    with serve(tmp_path, "--model-control", "explicit", "--load-model", "*") as server:
        with preblock.connect(server.address) as client:
            client.unload("gpt")
        browser.events.clear()
        load(browser, server)
        browser.wait_for("document.getElementById('status').innerText === 'No model is ready.'")
        assert browser.evaluate(f"{json.dumps(PANELS)}.every((name) => document.getElementById(name).hidden)")
        check_events(browser, server)
