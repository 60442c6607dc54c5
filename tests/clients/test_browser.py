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


@pytest.mark.parametrize(
    ("model", "offsets", "indices"),
    [("gpt2", ([0], [50], [3, 0]), {}), ("bert", ([4],), {"token_type_ids": IDS % 2}), ("llama", ([50],), {})],
)
def test_model_in_browser_matches_onnxruntime(
    model: str, offsets: tuple[list[int], ...], indices: dict[str, Any], example_page: Page, artifacts: Path
) -> None:
    """To the bit; but a norm, and the sine and cosine, nearly."""
    for offset in offsets:
        expected = Session(artifacts / "models" / model / "1").run(
            {"input_ids": IDS, "offset": np.array(offset), **indices}
        )
        given = {name: values.tolist() for name, values in indices.items()}
        found = run(example_page, model, IDS.tolist(), offset, given)
        assert list(found) == list(expected)
        for name, vectors in expected.items():
            nearly = 1e-6 * np.abs(vectors).max() if model == "bert" else 2.0**-23 * name.startswith("rotary")
            np.testing.assert_allclose(found[name], vectors, rtol=0, atol=nearly)
        if indices:
            other = run(example_page, model, IDS.tolist(), offset)["embeddings"]
            assert not np.allclose(other, expected["embeddings"], atol=1e-3)


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

    shown = submit(artifact="/models/gpt2/1/", ids="[[5, 6]]", offset="[3]").splitlines()
    vectors = Session(artifacts / "models/gpt2/1").run({"input_ids": np.array([[5, 6]]), "offset": np.array([3])})
    assert (shown[0], shown[-1]) == ("embeddings [1,2,32]", "…")
    assert np.array_equal(np.array(shown[1:-1], np.float32), vectors["embeddings"].reshape(-1)[:8])
    assert submit(ids="[[5, -1]]") == "RangeError: input_ids: got -1, expected 0 to 98"
    assert submit(ids="[[5, 99]]") == "RangeError: input_ids: got 99, expected 0 to 98"
    assert submit(ids="[[5, 6]]", offset="[63]") == "RangeError: offset: got 63, expected 0 to 62"
