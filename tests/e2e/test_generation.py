"""Whole generations with the vectors of a running server, fed over a stream of the package's own client.

Oracle: `generate()` of transformers. For RoBERTa it feeds other positions than `forward()`, so the oracle is a greedy
loop of full forward passes. Other protocols answer with the same bits: tests/service/api/http/streaming.
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
from tests.e2e.test_examples import load
from tests.support.paths import ROOT
from tests.support.servers import Server, serve

COUNT, BEAMS = 14, 3
FAMILIES = ("gpt2", "opt", "llama", "roberta")
PAD = 1
"""Padding id of Marian and RoBERTa, without a position of its own: RoBERTa must not generate it."""

example = load(ROOT / "examples/generate_with_transformers.py")


def tiny(family: str) -> Any:
    if family in example.BLOCKS:
        return example.tiny(family)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 66, "initializer_range": 0.5}
    roberta = transformers.RobertaConfig(vocab_size=97, **sizes, is_decoder=True, type_vocab_size=1)
    decoder: Any = transformers.RobertaForCausalLM(roberta)
    return decoder.eval()


BLOCKS = {**example.BLOCKS, "roberta": "roberta.encoder.layer"}


class Decoder(example.Body):  # type: ignore[misc, name-defined]
    """A body of any family with given vectors for its first block."""

    def __init__(self, family: str, model: Any, blocks: Any) -> None:
        self.family = family
        super().__init__(model, blocks)

    def run(self, mask: torch.Tensor) -> Any:
        ids = torch.zeros(self._given[0].shape[:2], dtype=torch.long)
        return self.model(input_ids=ids, cache=self.cache, use_cache=True, attention_mask=mask)


class Embedder(Decoder):
    """The same with `inputs_embeds`: the model adds positions itself."""

    def __init__(self, family: str, model: Any, blocks: Any) -> None:
        super().__init__(family, model, blocks)
        self.remove()

    def run(self, mask: torch.Tensor) -> Any:
        given = self._given[0]
        positions = (mask.cumsum(1) - 1).clamp(0)[:, -given.shape[1] :] + (1 + PAD if self.family == "roberta" else 0)
        others = {"cache": self.cache, "use_cache": True, "attention_mask": mask, "position_ids": positions}
        return self.model(inputs_embeds=given, **others)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the front-ends of all families."""
    root: Path = tmp_path_factory.mktemp("decoders")
    for family in FAMILIES:
        source = tmp_path_factory.mktemp(family)
        tiny(family).save_pretrained(source)
        export(str(source), family, root)
    with serve(root) as running:
        yield running


@contextmanager
def open_stream(server: Server, family: str, offset: list[int], outputs: list[str]) -> Iterator[Any]:
    with (
        preblock.connect(server.address) as client,
        client.decode(family, offset=offset, output=outputs[0], companions=outputs[1:], resume=True) as stream,
    ):
        yield stream


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return tiny(family)


def library(model: Any, family: str, beams: int) -> list[list[int]]:
    """Return the generation of transformers."""
    if family == "roberta":
        return [forward_passes(model, prompt) for prompt in example.PROMPTS]
    tokens: list[list[int]] = example.library(model, example.PROMPTS, COUNT, beams)
    return tokens


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


@pytest.mark.parametrize(("kind", "right"), [(Decoder, 0), (Decoder, 2), (Decoder, 3), (Embedder, 1)])
def test_generation_with_drafts_and_reconnect_matches_library(
    decoders: Server, family: str, model: Any, expected: list[list[int]], kind: type[Decoder], right: int
) -> None:
    """The batch is padded on the left, drafts are taken back, and the connection breaks in the middle."""
    outputs = ["token_embeddings"] if kind is Embedder else ["embeddings", *example.COMPANIONS.get(family, ())]
    with body_of(kind, family, model) as body:
        found = example.generate(
            lambda offset: open_stream(decoders, family, offset, outputs),
            body,
            example.PROMPTS,
            COUNT,
            drafts_of(expected, right),
        )
    assert found == expected


def test_beam_search_matches_library(decoders: Server, family: str, model: Any) -> None:
    if family == "roberta":
        pytest.skip("its generate() feeds other positions than its forward()")
    outputs = ["embeddings", *example.COMPANIONS.get(family, ())]
    with body_of(Decoder, family, model) as body:
        found = example.search(
            lambda offset: open_stream(decoders, family, offset, outputs), body, example.PROMPTS, COUNT, BEAMS
        )
    assert found == library(model, family, BEAMS)


class Forgetful:
    """A stream that takes nothing back."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == "rewind" else getattr(self._stream, name)


def test_generation_without_rewind_differs(decoders: Server) -> None:
    """The proof above can fail."""
    model = tiny("gpt2")

    @contextmanager
    def open_at(offset: list[int]) -> Iterator[Any]:
        with open_stream(decoders, "gpt2", offset, ["embeddings"]) as stream:
            yield Forgetful(stream)

    with body_of(Decoder, "gpt2", model) as body:
        found = example.generate(open_at, body, example.PROMPTS, COUNT)
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
