"""Text to ids. Oracles: transformers on the real checkpoint, and the package tokenizers."""

import asyncio
import json
import random
import string
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer, Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from preblock.service.artifacts.io import describe
from preblock.service.core.errors import ArtifactError, Invalid, TooLarge
from preblock.service.core.types import TextRequest, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.runtime.tokenizer import (
    MAX_CHARACTERS_PER_TOKEN,
    MAX_WORD_CHARACTERS,
    MAX_WORDS,
    AsciiTokenizer,
    Tokenizer,
    WordIds,
    _naming_failures,
)
from tests.support.engines import ask_engine, open_engine
from tests.support.late import transformers
from tests.support.tokenizers import write_tokenizer

TEXTS = [
    *("Hello, world!", "Ünïcödé 😀 naïve\tcafé\n", "[SEP] is read as a token", "東京 2024", "word " * 300, " "),
    *("Two\nLINES of text", "a [sep] in lower case", "\x07bell and \x7f", "tab\there", "don't stop-it now..."),
]


def tokenizer_of(file: Path) -> Tokenizer:
    return Tokenizer(file, describe(file), 2**31)


@pytest.fixture
def tiny_tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path / "tokenizer.json")
    return tokenizer_of(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("spans", [False, True])
def test_tokens_equal_transformers_tokenizer(minilm_checkpoint: Path, spans: bool) -> None:
    oracle: Any = transformers.AutoTokenizer.from_pretrained(minilm_checkpoint)(
        TEXTS, return_offsets_mapping=True, truncation=False
    )
    tokens = tokenizer_of(minilm_checkpoint / "tokenizer.json").encode(TEXTS, 65536, spans, segments=True)
    assert tokens.input_ids.values.tolist() == [value for row in oracle["input_ids"] for value in row]
    assert tokens.input_ids.lengths.tolist() == [len(row) for row in oracle["input_ids"]]
    segments = tokens.indices["token_type_ids"]
    assert segments.values.tolist() == [value for row in oracle["token_type_ids"] for value in row]
    found = None if tokens.spans is None else tokens.spans.tolist()
    assert found == ([list(span) for row in oracle["offset_mapping"] for span in row] if spans else None)


def test_truncation_and_padding_of_the_file_are_disabled(tiny_tokenizer: Tokenizer) -> None:
    tokens = tiny_tokenizer.encode(["a b c d e f g", "a"], 100, spans=False, marks=True)
    assert tokens.special is not None
    assert tokens.input_ids.values.tolist() == [1, 4, 5, 6, 7, 8, 9, 10, 2, 1, 4, 2]
    assert tokens.special.tolist() == [True, *[False] * 7, True, True, False, True]
    assert tokens.spans is None


@pytest.mark.parametrize("spans", [False, True])
def test_word_without_token_is_rejected(tmp_path: Path, spans: bool) -> None:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]"))
    model.save(str(tmp_path / "tokenizer.json"))
    known = tokenizer_of(tmp_path / "tokenizer.json")
    assert known.encode(["a"], 8, spans).input_ids.values.tolist() == [0]
    with pytest.raises(Invalid, match="fails on this text: WordLevel error: Missing") as refused:
        known.encode(["a", "b", "c"], 8, spans)
    assert (refused.value.field, refused.value.bad_indices) == ("text[1]", [1, 2])


SPECIAL = ["<|im_end|>", "[SEP]", "<|im_end|> a [SEP]b<tool>", "<0>", "a <999> b", "[sep]"]


@pytest.mark.parametrize("special", [True, False])
def test_plain_text_equals_option_of_tokenizers(tmp_path: Path, special: bool) -> None:
    letters = {character: index for index, character in enumerate("".join(map(chr, range(32, 127))))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters | {"<unk>": 200}, [], unk_token="<unk>"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    for kind, tokens in (
        (tokenizer.add_special_tokens, ["<unk>", "<|im_end|>", tokenizers.AddedToken("[SEP]", normalized=True)]),
        (tokenizer.add_tokens, ["<tool>"]),
        (tokenizer.add_special_tokens, [f"<{number}>" for number in range(1000)]),
    ):
        kind(tokens)
    end = tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A [SEP]", special_tokens=[("[SEP]", end)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own, texts = tokenizer_of(tmp_path / "tokenizer.json"), [*SPECIAL, "é ordinary"]
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for option in ("allow", "plain"):
        tokenizer.encode_special_tokens = option == "plain"
        expected = [row.ids for row in tokenizer.encode_batch(texts, add_special_tokens=special)]
        for spans in (False, True):
            found = own.encode(texts, 10_000, spans, special, in_text=option).input_ids
            assert np.split(found.values, found.starts[1:])[0].tolist() == expected[0]
            assert found.values.tolist() == [token for row in expected for token in row]
    with pytest.raises(Invalid) as refused:
        own.encode(texts, 10_000, False, special, in_text="refuse")
    assert refused.value.bad_indices == [0, 1, 2, 3, 4, 5]


def test_piece_of_a_vocabulary_is_never_plain(tmp_path: Path) -> None:
    """The vocabulary of T5 holds `</s>` with the best score, and the option of the library has no effect on it."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -2.0) for character in "a</s>")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = tokenizer_of(tmp_path / "tokenizer.json")
    assert own.encode(["a</s>"], 9, False).input_ids.values.tolist() == [2, 1]
    for option in ("plain", "refuse"):
        assert own.encode(["aé"], 9, False, in_text=option).input_ids.values.tolist() == [2, 0]
        with pytest.raises(Invalid, match=r"^text\[1\]: got the token </s> \(id 1\), expected text "):
            own.encode(["a", "a</s>"], 9, False, in_text=option)
    with pytest.raises(
        Invalid, match=r"^text\[2\]: got '', expected text of at least one token; 3 bad items: 1, 2, 4$"
    ):
        own.encode(["a", "a</s>", "", "a", "</s>"], 9, False, in_text="refuse")
    with pytest.raises(Invalid, match=r"^text\[0\]: got the token <unk> \(id 0\), expected text without special "):
        own.encode(["<unk>"], 9, False, in_text="refuse")


def test_too_much_text_is_rejected_with_counts(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(TooLarge, match="text: got 9 tokens, expected at most 8 tokens in a request"):
        tiny_tokenizer.encode(["a b c d", "a"], 8, spans=False)
    with pytest.raises(TooLarge, match=f"text: got 65 characters, expected at most {4 * MAX_CHARACTERS_PER_TOKEN} "):
        tiny_tokenizer.encode(["a" * 64, "b"], 4, spans=False)
    with pytest.raises(TooLarge, match="text: got 5 texts, expected at most 4 tokens in a request"):
        tiny_tokenizer.encode(["a"] * 5, 4, spans=False)


def test_text_without_tokenizers_package_is_rejected(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Invalid, match="expected token ids, since the package tokenizers is not installed"):
        tiny_tokenizer.encode(["a"], 100, spans=False)


def changed(**parts: Any) -> bytes:
    """Return the tokenizer of the tiny models with other parts."""
    with tempfile.NamedTemporaryFile() as file:
        write_tokenizer(Path(file.name))
        return json.dumps(json.loads(Path(file.name).read_text()) | parts).encode()


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
UNKNOWN = {"SpecialToken": {"id": "[NOPE]", "type_id": 0}}
BROKEN = {
    "not JSON": b"{",
    "length 0": changed(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "broken map": changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAAA="}),
    "unknown special token": changed(
        post_processor={"type": "TemplateProcessing", "single": [UNKNOWN, SEQUENCE], "pair": [], "special_tokens": {}}
    ),
    "slow pattern": changed(pre_tokenizer=split("(a+)+$")),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_check_names_failing_tokenizer(tmp_path: Path, content: bytes) -> None:
    """The package panics for most of them, with an exception that is no `Exception`."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ArtifactError) as raised:
        tokenizer_of(tmp_path / "tokenizer.json").check()
    assert raised.value.field == "tokenizer.json"


@pytest.mark.parametrize("spans", [False, True])
def test_text_for_which_the_package_panics_is_rejected(tmp_path: Path, spans: bool) -> None:
    (tmp_path / "tokenizer.json").write_bytes(changed(pre_tokenizer=split("(b+)+$")))
    with pytest.raises(Invalid, match=r"^text\[1\]: the tokenizer of the model fails on this text"):
        tokenizer_of(tmp_path / "tokenizer.json").encode(["a", "b" * 24 + "!"], 100, spans)


@pytest.fixture
def engine(tiny_repository: Path) -> Iterator[Engine]:
    with open_engine(tiny_repository) as engine:
        yield engine


def test_segments_come_from_tokenizer(tmp_path: Path, engine: Engine) -> None:
    model = engine.repository.get("bert")
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file)
    file.write_text(file.read_text().replace('"type_id": 0', '"type_id": 1').replace('"type_id":0', '"type_id":1'))
    segments = TokenRows(np.ones(3, np.int64), np.array([3]))
    ids = TokenRows(np.array([1, 4, 2]), np.array([3]))
    request = TokenRequest(input_ids=ids, indices={"token_type_ids": segments})
    expected = asyncio.run(ask_engine(engine, model, request)).arrays["embeddings"]
    other = replace(model, tokenizer=tokenizer_of(file))
    found = asyncio.run(ask_engine(engine, other, TextRequest(text=("a",)))).arrays["embeddings"]
    assert found.tobytes() == expected.tobytes()


class Watched(Tokenizer):
    """Notes whether each call is in the main thread."""

    in_main: list[bool]

    def encode(self, *arguments: Any, **options: Any) -> TokenRequest:
        self.in_main.append(threading.current_thread() is threading.main_thread())
        return super().encode(*arguments, **options)


def test_long_text_leaves_the_event_loop(tmp_path: Path, engine: Engine) -> None:
    """The first text, too: it opens the tokenizer."""
    write_tokenizer(file := tmp_path / "tokenizer.json")
    tokenizer = Watched(file, describe(file), 2**31)
    tokenizer.in_main = []
    model = replace(engine.repository.get("bert"), tokenizer=tokenizer)
    for text in ("a", "a", "a " * 1000):
        asyncio.run(ask_engine(engine, model, TextRequest(text=(text,), truncate="left")))
    assert tokenizer.in_main == [False, True, False]


def test_deleted_tokenizer_file_stays_open(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    (tmp_path / "tokenizer.json").unlink()
    assert tiny_tokenizer.encode(["a"], 100, spans=False).input_ids.values.tolist() == [1, 4, 2]


def test_tokenizer_file_changed_since_start_up_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file)
    tokenizer = tokenizer_of(file)
    file.write_text(file.read_text().replace('"type_id":0', '"type_id":1').replace('"type_id": 0', '"type_id": 1'))
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: got sha256 .*, expected sha256 "):
        tokenizer.encode(["a"], 100, spans=False)


def test_interrupted_check_of_tokenizer_is_no_fault_of_it() -> None:
    with pytest.raises(KeyboardInterrupt), _naming_failures("tokenizer.json", "a"):
        raise KeyboardInterrupt


WORDS = ("[UNK]", "[CLS]", "[SEP]", "red", "Red", "##dish", "cafe", "café", "!", "<", ">", "Tag", "tag", "é", "e")
ASCII_TEXTS = (
    *("red", "Red", "REDdish!", "red\nRed", "red\tRed", "re\x00d", "re\x7fd", "café red", "cafe\u0301"),
    *("", " ", "red" * 40),
    *("a <Tag> here", "a <tag> here", "a <TAG>", "<\nTag>", "[CLS] red [SEP]", "[cls] Red", "é", "e", "red\xa0Red"),
)
CLS = AddedToken("[CLS]", special=True, normalized=False)
TAG = AddedToken("<Tag>", normalized=True)


def make(normalizer: Any, *added: AddedToken, template: str = "[CLS] $A [SEP]") -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = BertPreTokenizer()
    if template:
        specials = [("[CLS]", 1), ("[SEP]", 2)]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=specials)
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.mark.parametrize("special_tokens", [False, True])
@pytest.mark.parametrize(
    "tokenizer",
    [
        make(BertNormalizer(), CLS, TAG),
        make(BertNormalizer(), template=""),
        make(BertNormalizer(), template="[CLS] $A [SEP] $A"),
        make(BertNormalizer(lowercase=False), CLS, TAG),
        make(BertNormalizer(lowercase=False, strip_accents=True), CLS),
        make(BertNormalizer(clean_text=False), CLS, AddedToken("< Tag", normalized=True)),
        make(BertNormalizer(), AddedToken("é", normalized=True)),  # matches "e", too
        make(BertNormalizer(), AddedToken("\n", normalized=False)),
        make(Lowercase(), CLS, TAG),
        make(None, TAG),
    ],
)
def test_tokens_equal_the_whole_tokenizer(tokenizer: tokenizers.Tokenizer, special_tokens: bool) -> None:
    found = AsciiTokenizer(tokenizer)
    for texts in (ASCII_TEXTS, *([text] for text in ASCII_TEXTS)):
        expected = tokenizer.encode_batch(list(texts), add_special_tokens=special_tokens)
        for one, other in zip(found.encode(texts, special_tokens), expected, strict=True):
            assert (one.ids, one.type_ids) == (other.ids, other.type_ids)
            assert one.special_tokens_mask == other.special_tokens_mask
        if not special_tokens:
            for _ in range(2):  # the words are new, and then known
                assert [list(ids) for ids in found.ids(texts)] == [encoding.ids for encoding in expected]


def test_random_texts_equal_the_whole_tokenizer() -> None:
    tokenizer = make(BertNormalizer(), CLS, TAG)
    found, draw = AsciiTokenizer(tokenizer), random.Random(0)
    characters = [*string.printable, *"redREDdish", *["red", "cafe", "<tag>", "[CLS]", "é"]]
    texts = ["".join(draw.choices(characters, k=draw.randint(1, 30))) for _ in range(3000)]
    texts += ["x" * 99, "x" * 100, "x" * 101]  # the model refuses words of more than 100 characters
    expected = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    assert list(map(list, found.ids(texts))) == expected


def test_cache_of_words_is_bounded() -> None:
    words = WordIds(make(None).model)
    for number in range(MAX_WORDS):
        words[str(number)] = (number,)
    assert words["x" * (MAX_WORD_CHARACTERS + 1)] == (0,)
    assert len(words) == MAX_WORDS
    assert words["red"] == (3,)
    assert dict(words) == {"red": (3,)}
