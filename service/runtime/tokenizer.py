"""Text to token ids, by the tokenizer of an artifact: the only room that knows `tokenizers`."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from preblock.service.artifacts.records import File
from preblock.service.core.errors import ArtifactError, Invalid, TooLarge
from preblock.service.core.files import read_file
from preblock.service.core.types import Encoding, TokenRows

if TYPE_CHECKING:
    import tokenizers

MAX_CHARACTERS_PER_TOKEN = 16
"""Of text that are read for each token that a request may have; a tokenizer needs hundreds of bytes for each token."""


class Tokenizer:
    """A tokenizer file, opened when it is first used: start-up does not wait for it.

    Args:
        file: in the format of the package `tokenizers`.
        expected: what the manifest says of it, with which what is opened is compared once more.

    """

    def __init__(self, file: Path, expected: File) -> None:
        self._file, self._expected = file, expected

    @property
    def opened(self) -> bool:
        """Whether it was used before."""
        return "_tokenizer" in vars(self)

    def encode(self, text: Sequence[str], max_tokens: int, spans: bool) -> Encoding:
        """Return the tokens of each text, whole, with the special tokens that the tokenizer puts around it.

        Raises:
            Invalid: a text without a token, or `tokenizers` is not installed.
            TooLarge: too many characters, or more than `max_tokens` tokens.
            ArtifactError: the file is no tokenizer, or not the one of the manifest.

        """
        if len(text) > max_tokens:
            raise TooLarge("text", f"{len(text)} texts", f"at most {max_tokens} tokens in a request")
        characters, most = sum(map(len, text)), MAX_CHARACTERS_PER_TOKEN * max_tokens
        if characters > most:
            raise TooLarge("text", f"{characters} characters", f"at most {most} characters in a request")
        # Unlike `encode`, this releases the interpreter.
        found = self._tokenizer.encode_batch(list(text))
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        if lengths.sum() > max_tokens:
            raise TooLarge("text", f"{lengths.sum()} tokens", f"at most {max_tokens} tokens in a request")
        if not lengths.all():
            row = int(np.flatnonzero(lengths == 0)[0])
            raise Invalid(f"text[{row}]", repr(text[row]), "text of at least one token")
        ids, types, special = (
            np.fromiter(chain.from_iterable(getattr(encoding, name) for encoding in found), np.int64)
            for name in ("ids", "type_ids", "special_tokens_mask")
        )
        places = [encoding.offsets for encoding in found] if spans else []
        return Encoding(
            TokenRows(ids, lengths),
            TokenRows(types, lengths),
            special.astype(np.bool_),
            np.array(list(chain.from_iterable(places)), np.int64) if spans else None,
        )

    @cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        try:
            import tokenizers
        except ImportError as error:
            raise Invalid("text", "text", "token ids, since the package tokenizers is not installed") from error
        content = read_file(self._file, self._expected.bytes)
        if (found := hashlib.sha256(content).hexdigest()) != self._expected.sha256:
            raise ArtifactError(self._file.name, f"sha256 {found}", f"sha256 {self._expected.sha256}")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the package has no kind of its own for a file that it cannot read
            raise ArtifactError(self._file.name, str(error), "a file of the package tokenizers") from error
        # The file may state both; a text is embedded whole, or cut where the caller says so.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
