"""Tokenizers of BERT for texts in ASCII: without their normalizer, and without special tokens by a cache of words."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

WORD = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9 ]")
"""A word of BERT in printable ASCII: letters and digits, or one other character."""
MAX_WORDS = 2**14
"""Words in the cache: 8 MB of usual words, at most 23 MB."""
MAX_WORD_CHARACTERS = 32
"""Length of a word in the cache."""
MAX_CHARACTERS = 2**16
"""Characters divided into words at once: that keeps the interpreter lock for some milliseconds."""


class WordIds(dict[str, tuple[int, ...]]):
    """Ids of words, by the model of a tokenizer."""

    def __init__(self, model: Any) -> None:
        self._tokenize = model.tokenize

    def __missing__(self, word: str) -> tuple[int, ...]:
        """Return the ids of a new word, and keep them."""
        ids = tuple(token.id for token in self._tokenize(word))
        if len(word) <= MAX_WORD_CHARACTERS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids


class AsciiTokenizer:
    """Tokenizes texts faster, with the tokens of `tokenizer.encode_batch_fast`.

    In ASCII, BERT's normalizer only changes letters to lower case, and line breaks to spaces. Texts with another
    control character, or with an added token, need the whole tokenizer.

    Args:
        tokenizer: of any kind; with another normalizer it does all work.

    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        self._whole = tokenizer
        self._bare = type(tokenizer)(tokenizer.model)  # shares the vocabulary
        for part in ("pre_tokenizer", "post_processor"):
            if (value := getattr(tokenizer, part)) is not None:
                setattr(self._bare, part, value)
        normalizer: Any = tokenizer.normalizer
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        kinds = [type(part).__name__ for part in (normalizer, tokenizer.pre_tokenizer, tokenizer.model)]
        plain = all(token.isascii() and token.isprintable() for token in added)
        self._known = kinds[0] == "BertNormalizer" and plain
        self._words: WordIds | None = None
        if kinds[1:] == ["BertPreTokenizer", "WordPiece"] and self._adds_only_special_tokens():
            self._words = WordIds(tokenizer.model)
        self._cleans, self._lowers = self._known and normalizer.clean_text, self._known and normalizer.lowercase
        self._added = tuple(map(str.lower, added))

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list["tokenizers.Encoding"]:
        """Return the tokens of each text; raises as `encode_batch_fast`."""
        if not self._known:
            return self._whole.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        normal = [self._normalize(text) for text in texts]
        known = [text for text in normal if text is not None]
        others = [text for text, found in zip(texts, normal, strict=True) if found is None]
        fast = iter(self._bare.encode_batch_fast(known, add_special_tokens=add_special_tokens))
        slow = iter(self._whole.encode_batch_fast(others, add_special_tokens=add_special_tokens))
        return [next(slow if found is None else fast) for found in normal]

    def ids(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Return the ids of texts, at most `MAX_CHARACTERS`, without special tokens; raises as `encode_batch_fast`."""
        words = self._words
        if not self._known or words is None:
            return [encoding.ids for encoding in self.encode(texts, False)]
        normal = [self._normalize(text) for text in texts]
        others = [text for text, found in zip(texts, normal, strict=True) if found is None]
        slow = iter(self._whole.encode_batch_fast(others, add_special_tokens=False) if others else ())
        return [
            next(slow).ids if text is None else [*chain.from_iterable(map(words.__getitem__, WORD.findall(text)))]
            for text in normal
        ]

    def _adds_only_special_tokens(self) -> bool:
        """Return whether the post-processor leaves the ids alone without special tokens; one may repeat a text."""
        bare, word = type(self._bare)(self._bare.model), self._bare.id_to_token(0)
        if self._bare.post_processor is None or word is None:
            return word is not None
        bare.post_processor = self._bare.post_processor
        (found,) = bare.encode_batch_fast([word], add_special_tokens=False)
        return found.ids == [token.id for token in bare.model.tokenize(word)]

    def _normalize(self, text: str) -> str | None:
        """Return a text as the normalizer leaves it; None if it needs the whole tokenizer."""
        if self._cleans:
            text = text.replace("\n", " ")
        if not text.isascii() or not text.isprintable():
            return None
        lower = text.lower()
        if any(token in lower for token in self._added):
            return None
        return lower if self._lowers else text
