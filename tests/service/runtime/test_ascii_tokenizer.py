"""Texts without BERT's normalizer. Oracle: the package tokenizers, with it."""

import random
import string
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer, Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from preblock.service.runtime.tokenizer import (
    MAX_WORD_CHARACTERS,
    MAX_WORDS,
    AsciiTokenizer,
    WordIds,
)

WORDS = ("[UNK]", "[CLS]", "[SEP]", "red", "Red", "##dish", "cafe", "café", "!", "<", ">", "Tag", "tag", "é", "e")
TEXTS = (
    *("red", "Red", "REDdish!", "red\nRed", "red\tRed", "re\x00d", "re\x7fd", "café red", "cafe\u0301"),
    *("", " ", "red" * 40),
    *("a <Tag> here", "a <tag> here", "a <TAG>", "<\nTag>", "[CLS] red [SEP]", "[cls] Red", "é", "e", "red\xa0Red"),
)
SPECIAL = AddedToken("[CLS]", special=True, normalized=False)
TAG = AddedToken("<Tag>", normalized=True)


def make(normalizer: Any, *added: AddedToken, template: str = "[CLS] $A [SEP]") -> Tokenizer:
    tokenizer = Tokenizer(WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
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
        make(BertNormalizer(), SPECIAL, TAG),
        make(BertNormalizer(), template=""),
        make(BertNormalizer(), template="[CLS] $A [SEP] $A"),
        make(BertNormalizer(lowercase=False), SPECIAL, TAG),
        make(BertNormalizer(lowercase=False, strip_accents=True), SPECIAL),
        make(BertNormalizer(clean_text=False), SPECIAL, AddedToken("< Tag", normalized=True)),
        make(BertNormalizer(), AddedToken("é", normalized=True)),  # matches "e", too
        make(BertNormalizer(), AddedToken("\n", normalized=False)),
        make(Lowercase(), SPECIAL, TAG),
        make(None, TAG),
    ],
)
def test_tokens_equal_the_whole_tokenizer(tokenizer: Tokenizer, special_tokens: bool) -> None:
    found = AsciiTokenizer(tokenizer)
    for texts in (TEXTS, *([text] for text in TEXTS)):
        expected = tokenizer.encode_batch(list(texts), add_special_tokens=special_tokens)
        for one, other in zip(found.encode(texts, special_tokens), expected, strict=True):
            assert (one.ids, one.type_ids) == (other.ids, other.type_ids)
            assert one.special_tokens_mask == other.special_tokens_mask
        if not special_tokens:
            for _ in range(2):  # the words are new, and then known
                assert [list(ids) for ids in found.ids(texts)] == [encoding.ids for encoding in expected]


def test_random_texts_equal_the_whole_tokenizer() -> None:
    tokenizer = make(BertNormalizer(), SPECIAL, TAG)
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
