"""One server and one browser for all tests of the inspector."""

import shutil
from collections.abc import Iterator

import pytest

from tests.clients.browser import Page, browsing
from tests.clients.inspector.controls import load
from tests.support.artifacts import copy_artifact
from tests.support.paths import ROOT
from tests.support.references import edit_manifest
from tests.support.servers import Server, serve


@pytest.fixture(scope="package")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve models of every kind: segments and text, learned positions, rotary, biases, n-grams, images, static."""
    root = tmp_path_factory.mktemp("inspected")
    for name in ("bert", "gpt", "rotary", "t5", "alibi", "sinusoid", "ngrams", "vit"):
        copy_artifact(name, root)
    copy_artifact("bert-again", root, "bert")
    shutil.copytree(ROOT / "model_repository/wordllama", root / "wordllama")
    edit_manifest(root / "t5/1", lambda manifest: manifest["source"].update(kind="preset", name="tiny"))
    with serve(root, "--allowed-hosts", "service.test") as running:
        yield running


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing("about:blank", tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, inspected: Server) -> Page:
    browser.events.clear()
    browser.call("Emulation.clearDeviceMetricsOverride")
    load(browser, inspected)
    browser.wait_for("document.getElementById('version').value")
    return browser
