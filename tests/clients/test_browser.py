"""The example for browsers, in a real one: the artifact's own files, run by onnxruntime-web as WebAssembly."""

import base64
import functools
import json
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.export.exporter import export
from preblock.service.runtime.session import Session
from tests.clients.browser import CHROMIUM, Page, browsing
from tests.families.library_models import save
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples/browser"
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.skipif(
        not (EXAMPLE / "node_modules/onnxruntime-web").is_dir(),
        reason="no onnxruntime-web: npm ci --ignore-scripts in examples/browser",
    ),
]
IDS = np.random.default_rng(0).integers(3, 90, (2, 7))


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that says nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example, and the artifacts of tiny published models beside it."""
    root = tmp_path_factory.mktemp("site")
    (root / "example").symlink_to(EXAMPLE)
    for name in ("gpt2", "bert", "llama"):
        save(name, root / "checkpoints" / name)
        export(str(root / "checkpoints" / name), name, root / "models")
    return root


@pytest.fixture(scope="module")
def example_page(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    handler = functools.partial(Quiet, directory=str(artifacts))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/example/index.html"
        with browsing(address, tmp_path_factory.mktemp("profile")) as opened:
            yield opened
        server.shutdown()


def run(page: Page, model: str, *arguments: Any) -> dict[str, NDArray[np.float32]]:
    """Call the example's own function, and return every output to the bit."""
    found = page.evaluate(f"""
      (async () => {{
        const {{ open, run }} = await import("/example/frontend.js");
        const outputs = await run(await open("/models/{model}/1/"), ...{json.dumps(arguments)});
        return Object.entries(outputs).map(([name, {{ dims, data }}]) =>
          [name, dims, btoa(Array.from(new Uint8Array(data.buffer, data.byteOffset, data.byteLength),
            (byte) => String.fromCharCode(byte)).join(""))]);
      }})()""")
    return {name: np.frombuffer(base64.b64decode(text), np.float32).reshape(dims) for name, dims, text in found}


def test_gpt2_in_browser_matches_onnxruntime_bit_for_bit(example_page: Page, artifacts: Path) -> None:
    session = Session(artifacts / "models/gpt2/1")
    for offset in ([0], [50], [3, 0]):
        expected = session.run({"input_ids": IDS, "offset": np.array(offset)})
        found = run(example_page, "gpt2", IDS.tolist(), offset)
        assert list(found) == ["embeddings"]
        assert np.array_equal(found["embeddings"], expected["embeddings"])


def test_bert_in_browser_is_close_to_onnxruntime(example_page: Page, artifacts: Path) -> None:
    segments = IDS % 2
    feeds = {"input_ids": IDS, "offset": np.array([4]), "token_type_ids": segments}
    expected = Session(artifacts / "models/bert/1").run(feeds)["embeddings"]
    found = run(example_page, "bert", IDS.tolist(), [4], {"token_type_ids": segments.tolist()})["embeddings"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert not np.allclose(run(example_page, "bert", IDS.tolist(), [4])["embeddings"], expected, atol=1e-3)


def test_llama_in_browser_returns_rotary_outputs(example_page: Page, artifacts: Path) -> None:
    expected = Session(artifacts / "models/llama/1").run({"input_ids": IDS, "offset": np.array([50])})
    found = run(example_page, "llama", IDS.tolist(), [50])
    assert list(found) == list(expected)
    assert np.array_equal(found["embeddings"], expected["embeddings"])
    for name in ("rotary_cos", "rotary_sin"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2.0**-23)


def test_page_shows_vectors_and_errors(example_page: Page, artifacts: Path) -> None:
    def submit(**values: str) -> str:
        text = example_page.evaluate(f"""
          (async () => {{
            const form = document.querySelector("form"), output = document.querySelector("output");
            for (const [name, value] of Object.entries({json.dumps(values)})) form.elements[name].value = value;
            form.requestSubmit();
            while (["", "…"].includes(output.value)) await new Promise((done) => setTimeout(done, 10));
            return output.value;
          }})()""")
        return str(text)

    shown = submit(artifact="/models/gpt2/1/", ids="[[5, 6]]", offset="[3]")
    vectors = Session(artifacts / "models/gpt2/1").run({"input_ids": np.array([[5, 6]]), "offset": np.array([3])})
    first = vectors["embeddings"].reshape(-1)[:8]
    name, *numbers = shown.splitlines()
    assert (name, numbers[-1]) == ("embeddings [1,2,32]", "…")
    assert np.array_equal(np.array(numbers[:-1], np.float32), first)
    assert submit(ids="[[5, 99]]") == "RangeError: input_ids: got 99, expected 0 to 98"
    assert submit(ids="[[5, -1]]") == "RangeError: input_ids: got -1, expected 0 to 98"
    assert submit(ids="[[5, 6]]", offset="[63]") == "RangeError: offset: got 63, expected 0 to 62"
