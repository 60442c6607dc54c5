"""Whole generations with the vectors of a running server, by the example. Oracle: `generate()` of transformers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import preblock
from preblock.export.exporter import export
from tests.e2e.test_examples import load
from tests.support.paths import ROOT
from tests.support.servers import Server, serve

COUNT = 14
example = load(ROOT / "examples/generate_with_transformers.py")


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the front-ends of all families."""
    root: Path = tmp_path_factory.mktemp("decoders")
    for family in example.BLOCKS:
        source = tmp_path_factory.mktemp(family)
        example.tiny(family).save_pretrained(source)
        export(str(source), family, root)
    with serve(root) as running:
        yield running


def drafts_of(expected: list[list[int]], right: int) -> Any:
    """Return a function to draft tokens, the first `right` of them correct."""

    def draft(prompt: int, before: list[int]) -> list[int]:
        true = [*expected[prompt][len(before) :], 20, 20, 20][:3]
        return true[:right] + [21 if token == 22 else 22 for token in true[right:]]

    return draft


@pytest.mark.parametrize("family", example.BLOCKS)
def test_generation_with_drafts_and_reconnect_matches_library(decoders: Server, family: str) -> None:
    """The batch is padded on the left, drafts are taken back, and the connection breaks in the middle."""
    model = example.tiny(family)
    expected = example.library(model, example.PROMPTS, COUNT)
    assert len({token for row in expected for token in row}) > 5, "a generation that would hide a mistake"
    with preblock.connect(decoders.address) as client:

        def open_at(offset: list[int]) -> AbstractContextManager[Any]:
            return client.decode(family, offset=offset, companions=example.COMPANIONS.get(family, ()), resume=True)

        for right in range(4):
            body = example.Body(model, model.get_submodule(example.BLOCKS[family]))
            found = example.generate(open_at, body, example.PROMPTS, COUNT, drafts_of(expected, right))
            body.remove()
            assert found == expected, right
    example.compare(model, decoders.address, family)  # beam search too


def test_generation_example_accepts_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.tiny("opt").save_pretrained(tmp_path)
    example.main([str(tmp_path)])
    assert capsys.readouterr().out.count("as the library") == 2 * len(example.PROMPTS)
