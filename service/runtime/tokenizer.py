"""Text to token ids, by the tokenizer of an artifact. In the service only this module imports `tokenizers`."""

import hashlib
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from preblock.service.artifacts.manifest import File
from preblock.service.core.errors import ENDS, ArtifactError, Invalid, TooLarge, shorten
from preblock.service.core.files import open_file, unreadable
from preblock.service.core.system import return_free_memory
from preblock.service.core.types import Encoding, Int64, TokenRows
from preblock.service.runtime.ascii_tokenizer import AsciiTokenizer

if TYPE_CHECKING:
    import tokenizers

MAX_CHARACTERS_PER_TOKEN = 16
"""Bounds the work for long text: a tokenizer needs hundreds of bytes of memory per token."""
SAMPLES = (
    *("", "a", "Hello, world! It's 2024.", "  \t\r\n ", "naïve ÉCOLE ß ŉ", "e\u0301 \u1100\u1161\u11a8"),
    *("東京 日本語テキスト", "العربية עברית", "👩\u200d👧 \U0001f1e9\U0001f1ea", "\x00\x07\u200b\u2028\ufeff\ufffd"),
    *("[CLS] [SEP] <s> </s> <unk> <|endoftext|>", "abcdefghij" * 30, "1234567890" * 10, " " * 300, "a" * 24 + "!"),
)
"""Texts that make a malformed tokenizer fail: scripts, marks, controls, special tokens, long words."""


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
        only_ids = not (spans or special_tokens or segments or marks)
        found, ids = self._tokenize(text, spans, special_tokens, only_ids)
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

    def _tokenize(
        self, text: Sequence[str], spans: bool, special_tokens: bool, only_ids: bool
    ) -> tuple[list[Any], Sequence[Sequence[int]]]:
        """Return the encodings of texts, and their ids; no encodings if only the ids are needed.

        Raises:
            Invalid: the tokenizer refuses a text.

        """
        # Both release the interpreter lock, unlike `encode`. The fast one finds no spans.
        tokenize = self._tokenizer.encode_batch if spans else self._fast.encode
        try:
            if only_ids:
                return [], self._fast.ids(text)
            found = tokenize(list(text), add_special_tokens=special_tokens)
            return found, [encoding.ids for encoding in found]
        except BaseException as error:
            if not is_failure(error):
                raise
            # An unknown word and no unknown token, for example, or a regular expression that takes too long.
            message = f"text: the tokenizer of the model fails on this text: {reason_of(error)}"
            raise Invalid("text", "text that the tokenizer fails on", "other text", message=message) from error

    def spell(self, ids: Sequence[int]) -> list[str | None]:
        """Return the token of each id as the vocabulary spells it; None for an id outside of it.

        Raises:
            Invalid, ArtifactError: as `encode`, of a package or a file.

        """
        return [self._tokenizer.id_to_token(token) for token in ids]

    def check(self) -> None:
        """Tokenize a few texts without keeping the tokenizer in memory. Without its package, check nothing.

        Raises:
            ArtifactError: the file is no tokenizer, differs from the manifest, or fails on ordinary text.

        """
        with suppress(Invalid):
            check_tokenizer(self._name, self._read())
        return_free_memory()

    @cached_property
    def _fast(self) -> AsciiTokenizer:
        return AsciiTokenizer(self._tokenizer)

    @cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        return _parse(self._name, self._read())

    def _read(self) -> bytes:
        try:
            content = os.pread(self._descriptor, self._expected.bytes + 1, 0)
        except OSError as error:
            raise unreadable(self._name, error) from error
        if (found := hashlib.sha256(content).hexdigest()) != self._expected.sha256:
            raise ArtifactError(self._name, f"sha256 {found}", f"sha256 {self._expected.sha256}")
        return content


def is_failure(error: BaseException) -> bool:
    """Return whether `tokenizers` raised `error`: `Exception` itself, or a panic of Rust, which is no `Exception`."""
    return type(error) is Exception or not isinstance(error, (Exception, *ENDS))


def reason_of(error: BaseException) -> str:
    """Return the message of an error of `tokenizers` in one line."""
    return shorten(" ".join(str(error).split()))


def check_tokenizer(name: str, content: bytes) -> int:
    """Run the tokenizer in `content`, the file `name`, on `SAMPLES`, and return its largest id; -1 without any token.

    Raises:
        Invalid: `tokenizers` is not installed.
        ArtifactError: the file is no tokenizer, or it fails on a text. An unknown word may have no token.

    """
    tokenizer = _parse(name, content)
    with _naming_failures(name, ""):
        fast = AsciiTokenizer(tokenizer)
        # The ids of the special tokens around a text need not be in the vocabulary.
        ids = chain(tokenizer.get_vocab(with_added_tokens=True).values(), tokenizer.encode("").ids)
        largest = max(ids, default=-1)
    for text in SAMPLES:
        for tokenize in (tokenizer.encode_batch, fast.encode):
            with _naming_failures(name, text):
                tokenize([text], add_special_tokens=True)
    return largest


@contextmanager
def _naming_failures(name: str, text: str) -> Iterator[None]:
    """Raise ArtifactError if the tokenizer in the file `name` fails on `text`, except for an unknown word."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        reason = reason_of(error)
        if not re.search(r"\bunk", reason, re.IGNORECASE):
            message = f"{name}: the tokenizer fails on the text {shorten(ascii(text))}: {reason}"
            raise ArtifactError(name, reason, "a tokenizer for any text", message=message) from error


def _parse(name: str, content: bytes) -> "tokenizers.Tokenizer":
    try:
        import tokenizers
    except ImportError as error:
        raise Invalid("text", "text", "token ids, since the package tokenizers is not installed") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:  # the package has no exception of its own
        if not (is_failure(error) or isinstance(error, ValueError)):
            raise
        message = f"{name} is no tokenizer of the package tokenizers: {reason_of(error)}"
        raise ArtifactError(name, reason_of(error), "a file of the package tokenizers", message=message) from error
    # The file may configure both; the service truncates on request only.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
