"""Text to token ids, by the tokenizer of an artifact. Only this module imports `tokenizers`."""

import hashlib
import os
import weakref
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from preblock.service.artifacts.records import File
from preblock.service.core.errors import ArtifactError, Invalid, TooLarge
from preblock.service.core.files import open_file, unreadable
from preblock.service.core.types import Encoding, Int64, TokenRows
from preblock.service.runtime.ascii_tokenizer import AsciiTokenizer

if TYPE_CHECKING:
    import tokenizers

MAX_CHARACTERS_PER_TOKEN = 16
"""Bounds the work for long text: a tokenizer needs hundreds of bytes of memory per token."""


class Tokenizer:
    """A tokenizer file, read on first use so that start-up does not wait for it. It is open before, and may be deleted.

    Args:
        file: in the format of the package `tokenizers`.
        expected: its entry in the manifest; the content is compared with it again.

    Raises:
        ArtifactError: the file cannot be opened.
        Unavailable: the process lacks descriptors or memory.

    """

    def __init__(self, file: Path, expected: File) -> None:
        self._name, self._expected, stream = file.name, expected, open_file(file)
        self._descriptor = stream.fileno()
        weakref.finalize(self, stream.close)

    @property
    def opened(self) -> bool:
        """Whether the file has been read."""
        return "_tokenizer" in vars(self)

    def encode(
        self,
        text: Sequence[str],
        max_tokens: int,
        spans: bool,
        special_tokens: bool = True,
        segments: bool = False,
        marks: bool = False,
    ) -> Encoding:
        """Return the tokens of each text, untruncated.

        Args:
            text: the texts.
            max_tokens: most tokens of all texts together.
            spans: whether to return the characters of each token.
            special_tokens: whether to add the tokenizer's special tokens.
            segments: whether to return the segment of each token.
            marks: whether to return which tokens are special.

        Raises:
            Invalid: a text has no token, the tokenizer refuses it, or `tokenizers` is not installed.
            TooLarge: too many characters, or more than `max_tokens` tokens.
            ArtifactError: the file is no tokenizer, or differs from the manifest.

        """
        if len(text) > max_tokens:
            raise TooLarge("text", f"{len(text)} texts", f"at most {max_tokens} tokens in a request")
        characters, most = sum(map(len, text)), MAX_CHARACTERS_PER_TOKEN * max_tokens
        if characters > most:
            raise TooLarge("text", f"{characters} characters", f"at most {most} characters in a request")
        # Both release the interpreter lock, unlike `encode`. The fast one finds no spans.
        tokenize = self._tokenizer.encode_batch if spans else self._fast.encode
        only_ids = not (spans or special_tokens or segments or marks)
        try:
            found = [] if only_ids else tokenize(list(text), add_special_tokens=special_tokens)
            ids = self._fast.ids(text) if only_ids else [encoding.ids for encoding in found]
        except Exception as error:  # such as an unknown word, and a vocabulary without an unknown token
            message = f"text: got one without tokens, expected text in the vocabulary of the tokenizer: {error}"
            raise Invalid("text", "text without tokens", "text in the vocabulary", message=message) from error
        counts = list(map(len, ids))
        if sum(counts) > max_tokens:
            raise TooLarge("text", f"{sum(counts)} tokens", f"at most {max_tokens} tokens in a request")
        if 0 in counts:
            row = counts.index(0)
            raise Invalid(f"text[{row}]", repr(text[row]), "text of at least one token")

        lengths = np.array(counts, np.int64)

        def join(name: str) -> Int64:
            return np.fromiter(chain.from_iterable(getattr(encoding, name) for encoding in found), np.int64)

        return Encoding(
            input_ids=TokenRows(np.fromiter(chain.from_iterable(ids), np.int64), lengths),
            token_type_ids=TokenRows(join("type_ids"), lengths) if segments else None,
            special=join("special_tokens_mask").astype(np.bool_) if marks else None,
            spans=np.array([span for encoding in found for span in encoding.offsets], np.int64) if spans else None,
        )

    def spell(self, ids: Sequence[int]) -> list[str | None]:
        """Return the token of each id as the vocabulary spells it; None for an id outside of it.

        Raises:
            Invalid, ArtifactError: as `encode`, of a package or a file.

        """
        return [self._tokenizer.id_to_token(token) for token in ids]

    @cached_property
    def _fast(self) -> AsciiTokenizer:
        return AsciiTokenizer(self._tokenizer)

    @cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        try:
            content = os.pread(self._descriptor, self._expected.bytes + 1, 0)
        except OSError as error:
            raise unreadable(self._name, error) from error
        if (found := hashlib.sha256(content).hexdigest()) != self._expected.sha256:
            raise ArtifactError(self._name, f"sha256 {found}", f"sha256 {self._expected.sha256}")
        return _parse(self._name, content)


def find_largest_id(name: str, content: bytes) -> int:
    """Return the largest id that the tokenizer in `content`, the file `name`, can give; -1 without any token.

    Raises:
        Invalid: `tokenizers` is not installed.
        ArtifactError: the file is no tokenizer.

    """
    tokenizer = _parse(name, content)
    # The ids of the special tokens around a text need not be in the vocabulary.
    ids = chain(tokenizer.get_vocab(with_added_tokens=True).values(), tokenizer.encode("").ids)
    return max(ids, default=-1)


def _parse(name: str, content: bytes) -> "tokenizers.Tokenizer":
    try:
        import tokenizers
    except ImportError as error:
        raise Invalid("text", "text", "token ids, since the package tokenizers is not installed") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package has no exception of its own
        message = f"{name} is no tokenizer of the package tokenizers: {error}"
        raise ArtifactError(name, str(error), "a file of the package tokenizers", message=message) from error
    # The file may configure both; the service truncates on request only.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
