"""The inspector in a real browser: every panel is used, with the values of NumPy and the words of the API."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import preblock
from preblock.service.core.auth import new_key
from tests.clients.browser import CHROMIUM, Page
from tests.clients.inspector.controls import (
    PANELS,
    cells,
    check_events,
    choose,
    choose_version,
    count_colours,
    embed,
    fill,
    load,
    submit,
    text,
    ticks,
    use_stream,
    wait_for_text,
    wait_for_view,
)
from tests.support.artifacts import copy_artifact, read_tables
from tests.support.servers import Server, serve

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


def native(server: Server, model: str, **fields: Any) -> Any:
    return httpx.post(f"{server.address}/models/{model}/embed", json={"encoding": "float", **fields}).json()


def test_model_panel_matches_api_description(page: Page, inspected: Server) -> None:
    choose(page, "bert")
    described = httpx.get(f"{inspected.address}/models/bert").json()
    facts = text(page, "facts")
    for expected in (described["identity"], "bert, version 2", "0 to 10", "float32", "token_type_ids 0 to 1"):
        assert expected in facts
    assert f"running {described['provider']}" in facts
    choose_version(page, "bert", 1)
    other = httpx.get(f"{inspected.address}/models/bert/versions/1").json()["identity"]
    assert other in text(page, "facts")
    assert other != described["identity"]


def test_random_weights_of_preset_are_shown(page: Page) -> None:
    choose(page, "t5")
    assert "preset, tiny, random weights" in text(page, "facts")
    shown = page.evaluate("[...document.querySelectorAll('option')].map((option) => option.innerText)")
    assert [line for line in shown if "random weights" in line] == ["t5 (random weights)"]
    assert [row[1] for row in cells(page, "served")].count("random weights") == 1


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("vit", {"embed", "neighbours", "positions", "decode"}),
        ("wordllama", {"positions", "decode"}),
        ("ngrams", {"positions"}),
        ("sinusoid", {"positions"}),
        ("rotary", set()),
    ],
)
def test_panels_with_content_have_headings_and_links(
    model: str, missing: set[str], page: Page, inspected: Server
) -> None:
    page.evaluate(f"document.querySelector('#served [value={model}]').click()")
    page.wait_for(f"document.getElementById('status').innerText.startsWith('{model}')")
    found = page.evaluate("""Array.from(document.querySelectorAll("main section"), (section) => [section.id,
        document.getElementById(section.getAttribute("aria-labelledby")).textContent, section.checkVisibility()])""")
    titles = ("Models", "Model", "Embed", "Nearest tokens", "Positions", "Decode")
    assert found == [[name, title, name not in missing] for name, title in zip(PANELS, titles, strict=True)]
    links = page.evaluate("[...document.querySelectorAll('nav a:not([hidden])')].map((link) => link.hash)")
    assert links == [*(f"#{name}" for name in PANELS if name not in missing), ""]
    assert page.evaluate("document.getElementById('model').value") == model
    check_events(page, inspected)


def test_embed_panel_shows_ids_positions_norms_and_values(page: Page, inspected: Server) -> None:
    choose(page, "gpt")
    embed(page, content="5, 6, 1", offset="2")
    rows = cells(page, "vectors")
    assert [row[1:3] for row in rows] == [["5", "2"], ["6", "3"], ["1", "4"]]
    vectors = np.array(native(inspected, "gpt", input_ids=[5, 6, 1], offset=2)["embeddings"][0])
    assert np.allclose([float(row[3]) for row in rows], np.linalg.norm(vectors, axis=1), rtol=1e-3)
    first = [[float(value) for value in row[4].split(", ")[:-1]] for row in rows]
    assert np.allclose(first, vectors[:, :3], rtol=1e-3)
    times = cells(page, "timings")
    assert [name for name, *_ in times] == ["parse and check", "queue", "model", "network, page", "total"]
    check_events(page, inspected)


@pytest.mark.parametrize("output", ["ngram_embeddings", "ngram_row_ids"])
def test_embed_panel_shows_outputs_of_several_layers(output: str, page: Page, inspected: Server) -> None:
    choose(page, "ngrams")
    embed(page, content="5, 6, 1", output=output)
    found = [[float(value) for value in row[4].split(", ")[:-1]] for row in cells(page, "vectors")]
    answer = native(inspected, "ngrams", input_ids=[5, 6, 1], output=output)
    expected = np.array(answer[output][0]).reshape(3, -1)[:, :3]
    assert np.allclose(found, expected, rtol=0 if output == "ngram_row_ids" else 1e-3)
    check_events(page, inspected)


def test_embed_panel_shows_tokens_of_text(page: Page) -> None:
    choose_version(page, "bert", 1)
    embed(page)
    assert "next offset" in text(page, "embed-words")
    page.wait_for("document.getElementById('spans').innerText.startsWith('[CLS]')")
    assert text(page, "vectors").splitlines()[-1].startswith("[SEP]")


def test_embed_panel_sends_token_types(page: Page) -> None:
    choose(page, "bert")
    page.evaluate("document.querySelector('[name=input][value=input_ids]').click()")
    page.evaluate("document.querySelector('#indices input').value = '0, 1'")
    embed(page, content="3, 4")
    assert text(page, "columns").split()[3] == "token_type_ids"
    assert [row[3] for row in cells(page, "vectors")] == ["0", "1"]
    page.evaluate("document.querySelector('#indices input').value = '0, 2'")
    submit(page, "embed")
    assert "token_type_ids[1]: got 2, expected 0 to 1" in wait_for_text(page, "embed-error")


def test_embed_panel_shows_api_error_message(page: Page) -> None:
    choose(page, "gpt")
    for ids, offset, message in (
        ("7", "0", "422 Invalid: input_ids[0]: got 7, expected 0 to 6 (request "),
        ("1", "-1", "422 Invalid: offset"),
        ("one", "0", "input_ids: got one, expected integers"),
        ("", "0", "422 Invalid: input_ids"),
    ):
        fill(page, content=ids, offset=offset)
        submit(page, "embed")
        page.wait_for(f"document.getElementById('embed-error').innerText.startsWith({json.dumps(message)})")
        assert page.evaluate("document.getElementById('embed-result').hidden")
    fill(page, offset="")  # the browser itself refuses it, with words of its own
    submit(page, "embed")
    assert text(page, "embed-error") == ""


def test_position_slider_shows_window_and_limit(page: Page, inspected: Server, tmp_path: Path) -> None:
    choose(page, "gpt")
    fill(page, window="2")
    wait_for_text(page, "ruler-words", "2 tokens at offset 0 ")
    assert "positions 0 to 1. max_len is 6, so 4 remain" in text(page, "ruler-words")
    assert text(page, "slider-value") == "0"
    rows = read_tables(copy_artifact("gpt", tmp_path))["positions"]
    least, most = (float(f"{value:.4g}") for value in (rows.min(), rows.max()))
    wait_for_text(page, "heatmap-words", f"rows 0 to 5, 4 columns, values {least:g} to {most:g}.")
    cosine = rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1])
    assert f"has cosine {float(f'{cosine:.4g}'):g} with the next" in text(page, "similarity-words")
    for picture in ("heatmap", "similarity"):
        assert count_colours(page, picture) >= 4
    for picture, axis, words in (
        ("heatmap", "down", ["position", *"012345"]),
        ("similarity", "across", ["position", *"024"]),
    ):
        assert ticks(page, picture, axis) == words
    fill(page, slider="5")
    wait_for_text(page, "ruler-words", "at offset 5 ")
    assert "It is refused: 1 are beyond max_len 6." in text(page, "ruler-words")
    assert count_colours(page, "ruler") >= 2
    fill(page, window="65")
    assert wait_for_text(page, "positions-error") == "tokens: got 65, expected 1 to 64"
    fill(page, window="1")
    page.wait_for("!document.getElementById('positions-error').innerText")
    check_events(page, inspected)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [("rotary", {"rotary_cos", "rotary_sin", "rotary_cos_near", "rotary_sin_near"}), ("t5", {"bias"})],
)
def test_positions_panel_shows_rotary_and_bias_pictures(
    model: str, kinds: set[str], page: Page, inspected: Server
) -> None:
    choose(page, model)
    wait_for_text(page, "heatmap-words")
    options = page.evaluate("Array.from(document.getElementById('picture').options, (option) => option.value)")
    assert set(options) == kinds
    for kind in kinds:
        fill(page, picture=kind)
        wait_for_text(page, "heatmap-words", "query by key" if kind == "bias" else f"{kind},")
        assert text(page, "positions-error") == ""
    if model == "rotary":  # these outputs end before the model
        fill(page, picture="rotary_cos_near", slider="15")
        wait_for_text(page, "ruler-words", "beyond max_len 16")
    check_events(page, inspected)


def test_decode_panel_streams_over_websocket(page: Page, inspected: Server) -> None:
    choose(page, "gpt")
    use_stream(page)
    assert any(event["method"] == "Network.webSocketCreated" for event in page.events)
    check_events(page, inspected)
    fill(page, open_offset="99")
    submit(page, "open")
    wait_for_text(page, "decode-error", "99")


def test_steps_submitted_at_once_take_turns(page: Page) -> None:
    choose(page, "gpt")
    fill(page, rows="1", open_offset="0")
    submit(page, "open")
    wait_for_view(page, "stream")
    fill(page, step_ids="5")
    page.evaluate("for (const _ of '12') document.getElementById('step-form').requestSubmit()")
    page.wait_for("document.querySelector('#messages td + td')?.innerText === '[2]'")
    assert text(page, "stream-rows").split(": ") == ["offset 2", "55"]


def test_late_error_of_other_model_leaves_panels(page: Page) -> None:
    """The browser holds the request for a missing version until another model is open."""
    page.call("Fetch.enable", patterns=[{"urlPattern": "*/versions/99"}])
    page.evaluate("document.getElementById('version').append(new Option('99'))")
    fill(page, version="99")
    choose(page, "gpt")
    (held,) = (event["params"]["requestId"] for event in page.events if event["method"] == "Fetch.requestPaused")
    page.call("Fetch.continueRequest", requestId=held)
    page.evaluate("fetch('/models/gpt/versions/98')")
    page.call("Fetch.disable")
    assert "gpt" in text(page, "facts")
    assert page.evaluate("document.getElementById('embed').checkVisibility()")


def test_nearest_tokens_match_api(page: Page, inspected: Server) -> None:
    choose(page, "gpt")
    fill(page, token="3", count="4")
    submit(page, "neighbours")
    wait_for_text(page, "nearest")
    body = httpx.get(f"{inspected.address}/models/gpt/neighbours?id=3&count=4").json()
    cosines = [entry["cosine"] for entry in body["neighbours"]]
    rows = cells(page, "nearest")
    assert [int(row[0]) for row in rows] == [entry["id"] for entry in body["neighbours"]]
    assert np.allclose([float(row[1]) for row in rows], cosines, rtol=1e-3)
    fill(page, token="99")
    submit(page, "neighbours")
    assert "id: got 99, expected 0 to 6" in wait_for_text(page, "neighbours-error")
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
        wait_for_view(browser, "key-form")
        assert text(browser, "status") == "This service needs an API key."
        fill(browser, key="wrong")
        submit(browser, "key")
        wait_for_text(browser, "status", "401 ")
        fill(browser, key=secret)
        submit(browser, "key")
        browser.wait_for("document.getElementById('version').value")
        assert browser.evaluate("document.getElementById('key-form').hidden")
        choose(browser, "gpt")
        use_stream(browser)
        embed(browser)
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
        wait_for_text(browser, "status", "No model is ready.")
        assert browser.evaluate(f"{json.dumps(PANELS)}.every((name) => document.getElementById(name).hidden)")
        check_events(browser, server)
