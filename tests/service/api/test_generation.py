"""Whole generations whose every vector comes from a running server. Oracle: `generate()` of transformers."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from incipit.export.exporter import export
from tests.conftest import ROOT, Server, serving

PROMPTS, COUNT = [[5, 6, 7], [11], [3, 1, 4, 1, 5], [9, 2]], 20
FAMILIES = ("gpt2", "llama")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("decode_loop", ROOT / "examples" / "decode_loop.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def decoders(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny models of the example."""
    root: Path = tmp_path_factory.mktemp("decoders")
    for family in FAMILIES:
        source = tmp_path_factory.mktemp(family)
        example.tiny(family)[0].save_pretrained(source)
        export(str(source), family, root)
    with serving(root) as running, httpx.Client(base_url=running.address) as http:
        assert http.get("/readyz").status_code == 200
        yield running


@pytest.fixture(scope="module", params=FAMILIES)
def expected(request: pytest.FixtureRequest, example: ModuleType) -> tuple[str, list[list[int]]]:
    return request.param, example.library(example.tiny(request.param)[0], PROMPTS, COUNT)


def generate(example: ModuleType, server: Server, family: str, **options: Any) -> tuple[list[int], list[list[int]]]:
    model, blocks, outputs = example.tiny(family)
    stream = example.Stream(f"{server.socket}/models/{family}/decode", outputs, [0] * len(PROMPTS))
    generated: tuple[list[int], list[list[int]]] = example.generate(
        stream, example.Body(model, blocks), PROMPTS, COUNT, **options
    )
    stream.close()
    return generated


@pytest.mark.parametrize("right", [0, 2, 3])
def test_the_tokens_are_those_of_the_library(
    example: ModuleType, decoders: Server, expected: tuple[str, list[list[int]]], right: int
) -> None:
    """Through a batch that is padded on the left, rows that change places, drafts of which so many are right, and a
    connection that breaks."""
    family, tokens = expected

    def draft(prompt: int, before: list[int]) -> list[int]:
        true = [*tokens[prompt][len(before) :], 0, 0, 0][:3]
        return true[:right] + [(token + 1) % 97 for token in true[right:]]

    origin, found = generate(example, decoders, family, draft=draft)
    assert origin == [3, 1, 2, 3]
    assert found == [tokens[prompt] for prompt in origin]


def test_a_rewind_that_is_left_out_shows(
    example: ModuleType, decoders: Server, expected: tuple[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, tokens = expected
    monkeypatch.setattr(example.Stream, "rewind", lambda *_: None)
    origin, found = generate(example, decoders, family)
    assert found != [tokens[prompt] for prompt in origin]
