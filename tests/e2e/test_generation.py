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
FAMILIES = ("gpt2", "opt", "llama", "marian", "roberta")
SOURCES = torch.tensor([[4, 5, 6, 7, 0], [8, 9, 0, 1, 1], [10, 11, 12, 0, 1], [13, 0, 1, 1, 1]])
"""Sources for Marian: its decoder begins with one token, the prompt."""
PAD = 1
"""Padding id of Marian and RoBERTa, without a position of its own: RoBERTa must not generate it."""

UNTIED: dict[str, Any] = {"tie_word_embeddings": False, "init_std": 0.05}
"""Otherwise a decoder with random weights repeats its prompt."""

example = load(ROOT / "examples/generate_with_transformers.py")


def tiny(family: str) -> Any:
    if family in example.BLOCKS:
        return example.tiny(family)
    torch.manual_seed(0)
    if family == "roberta":
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "max_position_embeddings": 66, "initializer_range": 0.5}
        roberta = transformers.RobertaConfig(vocab_size=97, **sizes, is_decoder=True, type_vocab_size=1)
        decoder: Any = transformers.RobertaForCausalLM(roberta)
        return decoder.eval()
    sizes = {f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "max_position_embeddings": 64}
    ids: dict[str, Any] = {
        "pad_token_id": PAD,
        "decoder_start_token_id": 2,
        "eos_token_id": 0,
        "forced_eos_token_id": None,
    }
    marian = transformers.MarianConfig(vocab_size=97, **sizes, **ids, scale_embedding=True, **UNTIED)
    translator: Any = transformers.MarianMTModel(marian)
    return translator.eval()


def prompts_of(family: str) -> list[list[int]]:
    prompts: list[list[int]] = [[2]] * len(SOURCES) if family == "marian" else example.PROMPTS
    return prompts


BLOCKS = {**example.BLOCKS, "marian": "model.decoder.layers", "roberta": "roberta.encoder.layer"}


class Decoder(example.Body):  # type: ignore[misc, name-defined]
    """A body of any family with given vectors for its first block."""

    def __init__(self, family: str, model: Any, blocks: Any) -> None:
        self.family = family
        super().__init__(model, blocks)
        self.sources = SOURCES
        if family == "marian":
            with torch.no_grad():
                self.encoded = model.get_encoder()(SOURCES, attention_mask=SOURCES != PAD)[0]

    def empty_cache(self) -> Any:
        config = self.model.config
        if self.family != "marian":
            return super().empty_cache()
        return transformers.EncoderDecoderCache(
            transformers.DynamicCache(config=config), transformers.DynamicCache(config=config)
        )

    def run(self, mask: torch.Tensor) -> Any:
        ids = torch.zeros(self._given[0].shape[:2], dtype=torch.long)
        return self.model(**self.tokens("input_ids", ids), **self.others(mask))

    def tokens(self, name: str, value: torch.Tensor) -> dict[str, Any]:
        return {f"decoder_{name}" if self.family == "marian" else name: value}

    def others(self, mask: torch.Tensor) -> dict[str, Any]:
        others: dict[str, Any] = {"cache": self.cache, "use_cache": True}
        if self.family != "marian":
            return others | {"attention_mask": mask}
        # The rows of a beam search follow each other as their prompts do.
        repeats = len(mask) // len(SOURCES)
        encoded = (self.encoded.repeat_interleave(repeats, 0),)
        return others | {"encoder_outputs": encoded, "attention_mask": (SOURCES != PAD).repeat_interleave(repeats, 0)}


class Embedder(Decoder):
    """The same with `inputs_embeds`: the model adds positions itself."""

    def __init__(self, family: str, model: Any, blocks: Any) -> None:
        super().__init__(family, model, blocks)
        self.remove()

    def run(self, mask: torch.Tensor) -> Any:
        given = self._given[0]
        others = self.others(mask)
        if self.family != "marian":
            positions = (mask.cumsum(1) - 1).clamp(0)[:, -given.shape[1] :]
            others["position_ids"] = positions + 1 + PAD if self.family == "roberta" else positions
        return self.model(**self.tokens("inputs_embeds", given), **others)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the front-ends of all families."""
    root: Path = tmp_path_factory.mktemp("decoders")
    for family in FAMILIES:
        source = tmp_path_factory.mktemp(family)
        tiny(family).save_pretrained(source)
        choices: dict[str, Any] = {"side": "decoder"} if family == "marian" else {}
        export(str(source), family, root, **choices)
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
            prompts_of(family),
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
            lambda offset: open_stream(decoders, family, offset, outputs), body, prompts_of(family), COUNT, BEAMS
        )
    assert found == library(model, family, BEAMS)


class Forgetful:
    """A stream without one of its operations."""

    def __init__(self, stream: Any, forgotten: str) -> None:
        self._stream, self._forgotten = stream, forgotten

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == self._forgotten else getattr(self._stream, name)


@pytest.mark.parametrize("forgotten", ["rewind", "reorder"])
def test_generation_without_rewind_or_reorder_differs(decoders: Server, forgotten: str) -> None:
    """The proofs above can fail."""
    model = tiny("gpt2")
    prompts = prompts_of("gpt2")

    @contextmanager
    def open_at(offset: list[int]) -> Iterator[Any]:
        with open_stream(decoders, "gpt2", offset, ["embeddings"]) as stream:
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
