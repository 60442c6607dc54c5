"""Whole generations with the vectors of a running server, over each streaming protocol.

Oracle: `generate()` of transformers. For RoBERTa it feeds other positions than `forward()`, so the oracle is a greedy
loop of full forward passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import preblock
from preblock.export.exporter import export
from tests.e2e.generation import (
    BEAMS,
    BLOCKS,
    COUNT,
    FAMILIES,
    PAD,
    PROTOCOLS,
    SOURCES,
    Decoder,
    Embedder,
    Protocol,
    example,
    prompts_of,
    tiny,
    websocket_binary,
)
from tests.support.protocols import Clients, connect
from tests.support.servers import serve


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """A server of the front-ends of all families."""
    root: Path = tmp_path_factory.mktemp("decoders")
    for family in FAMILIES:
        source = tmp_path_factory.mktemp(family)
        tiny(family).save_pretrained(source)
        choices: dict[str, Any] = {"side": "decoder"} if family == "marian" else {}
        export(str(source), family, root, **choices)
    with serve(root) as running, connect(running) as clients:
        yield clients


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return tiny(family)


def library(model: Any, family: str, beams: int) -> list[list[int]]:
    """Return the generation of transformers."""
    if family == "roberta":
        return [forward_passes(model, prompt) for prompt in prompts_of(family)]
    if family != "marian":
        tokens: list[list[int]] = example.library(model, prompts_of(family), COUNT, beams)
        return tokens
    options: dict[str, Any] = {"max_new_tokens": COUNT, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    found = model.generate(SOURCES, attention_mask=SOURCES != PAD, **options)
    return found[:, 1:].tolist()  # type: ignore[no-any-return]


@torch.no_grad()
def forward_passes(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(COUNT):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected(family: str, model: Any) -> list[list[int]]:
    tokens = library(model, family, 1)
    assert family != "roberta" or not any(PAD in row for row in tokens)
    assert len({token for row in tokens for token in row}) > 5, "a generation that would hide a mistake"
    return tokens


@contextmanager
def body_of(kind: type[Decoder], family: str, model: Any) -> Iterator[Decoder]:
    body = kind(family, model, model.get_submodule(BLOCKS[family]))
    try:
        yield body
    finally:
        body.remove()


def drafts_of(expected: list[list[int]], right: int) -> Any:
    """Return a function to draft tokens, the first `right` of them correct."""

    def draft(prompt: int, before: list[int]) -> list[int]:
        true = [*expected[prompt][len(before) :], 20, 20, 20][:3]
        return true[:right] + [21 if token == 22 else 22 for token in true[right:]]

    return draft


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
@pytest.mark.parametrize("kind", [Decoder, Embedder])
def test_generation_with_drafts_and_reconnect_matches_library(
    decoders: Clients, family: str, model: Any, expected: list[list[int]], protocol: Protocol, kind: type[Decoder]
) -> None:
    """The batch is padded on the left, drafts are taken back, and the connection breaks in the middle."""
    outputs = ["token_embeddings"] if kind is Embedder else ["embeddings", *example.COMPANIONS.get(family, ())]
    right = 0 if kind is Embedder else PROTOCOLS.index(protocol) % 4
    with body_of(kind, family, model) as body:
        found = example.generate(
            lambda offset: protocol(decoders, family, offset, outputs),
            body,
            prompts_of(family),
            COUNT,
            drafts_of(expected, right),
        )
    assert found == expected


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_beam_search_matches_library(decoders: Clients, family: str, model: Any, protocol: Protocol) -> None:
    if family == "roberta":
        pytest.skip("its generate() feeds other positions than its forward()")
    outputs = ["embeddings", *example.COMPANIONS.get(family, ())]
    with body_of(Decoder, family, model) as body:
        found = example.search(
            lambda offset: protocol(decoders, family, offset, outputs), body, prompts_of(family), COUNT, BEAMS
        )
    assert found == library(model, family, BEAMS)


class Forgetful:
    """A stream without one of its operations."""

    def __init__(self, stream: Any, forgotten: str) -> None:
        self._stream, self._forgotten = stream, forgotten

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == self._forgotten else getattr(self._stream, name)


@pytest.mark.parametrize("forgotten", ["rewind", "reorder"])
def test_generation_without_rewind_or_reorder_differs(decoders: Clients, forgotten: str) -> None:
    """The proofs above can fail."""
    model = tiny("gpt2")
    prompts = prompts_of("gpt2")

    @contextmanager
    def open_at(offset: list[int]) -> Iterator[Any]:
        with websocket_binary(decoders, "gpt2", offset, ["embeddings"]) as stream:
            yield Forgetful(stream, forgotten)

    with body_of(Decoder, "gpt2", model) as body:
        if forgotten == "rewind":
            found = example.generate(open_at, body, prompts, COUNT)
        else:  # one row for each prompt, where a search needs several
            with pytest.raises(preblock.client.errors.RequestError):
                example.search(open_at, body, prompts, COUNT, BEAMS)
            return
    assert found != library(model, "gpt2", 1)


def test_generation_example_accepts_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("opt").save_pretrained(tmp_path)
    example.main([str(tmp_path)])
    assert capsys.readouterr().out.count("as the library") == 2 * len(example.PROMPTS)


def test_generation_example_rejects_unknown_family(tmp_path: Path) -> None:
    config = transformers.BioGptConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.BioGptForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="holds a biogpt; this example knows gpt2, opt, llama"):
        example.main([str(tmp_path)])
