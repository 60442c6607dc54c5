"""Tokenizers with the normalizer of BERT, without it for most texts in ASCII: it takes nearly half of their time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers


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
        self._known = type(normalizer).__name__ == "BertNormalizer" and all(map(str.isascii, added))
        self._cleans, self._lowers = self._known and normalizer.clean_text, self._known and normalizer.lowercase
        self._added = tuple(map(str.lower, added))

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list["tokenizers.Encoding"]:
        """Return the tokens of each text; raises as `encode_batch_fast`."""
        if not self._known:
            return self._whole.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        normal = [self._normalize(text) for text in texts]
        known = [text for text in normal if text is not None]
        if len(known) == len(normal):
            return self._bare.encode_batch_fast(known, add_special_tokens=add_special_tokens)
        others = [text for text, found in zip(texts, normal, strict=True) if found is None]
        fast = iter(self._bare.encode_batch_fast(known, add_special_tokens=add_special_tokens))
        slow = iter(self._whole.encode_batch_fast(others, add_special_tokens=add_special_tokens))
        return [next(slow if found is None else fast) for found in normal]

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
