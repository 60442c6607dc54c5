"""Text to token ids, by the tokenizer of an artifact. In the service only this module imports `tokenizers`.

Texts in ASCII skip the normalizer of BERT. Without special tokens, a cache holds the ids of their words.
"""

import hashlib
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from preblock.service.artifacts.manifest import File
from preblock.service.core.errors import ENDS, ArtifactError, Invalid, TooLarge, shorten
from preblock.service.core.files import open_file, unreadable
from preblock.service.core.system import return_free_memory
from preblock.service.core.types import Bools, Int64, TokenRequest, TokenRows

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
MAX_CHARACTERS_PER_TOKEN = 16
"""Bounds the work for long text: a tokenizer needs hundreds of bytes of memory per token."""
UNKNOWN = "\U0010fffe"
"""A character of no language, which no vocabulary holds."""
SAMPLES = (
    *("", "a", "Hello, world! It's 2024.", "  \t\r\n ", "naïve ÉCOLE ß ŉ", "e\u0301 \u1100\u1161\u11a8"),
    *("東京 日本語テキスト", "العربية עברית", "👩\u200d👧 \U0001f1e9\U0001f1ea", "\x00\x07\u200b\u2028\ufeff\ufffd"),
    *("[CLS] [SEP] <s> </s> <unk> <|endoftext|>", "abcdefghij" * 30, "1234567890" * 10, " " * 300, "a" * 24 + "!"),
)
"""Texts that make a malformed tokenizer fail: scripts, marks, controls, special tokens, long words."""
NO_OPTIONS: Mapping[str, Any] = {}


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

    def tokenize(
        self, text: Sequence[str], spans: bool, special_tokens: bool, only_ids: bool, places: Sequence[str]
    ) -> tuple[list[Any], Sequence[Sequence[int]]]:
        """Return the encodings of texts, or their ids if only the ids are needed.

        An encoding makes its ids when it is asked for them, and holds the interpreter lock meanwhile.

        Raises:
            Invalid: the tokenizer refuses a text.

        """
        # Both release the interpreter lock, unlike `encode` of the package. The fast one finds no spans.
        tokenize = self._whole.encode_batch if spans else self.encode
        try:
            if only_ids:
                return [], self.ids(text)
            return tokenize(list(text), add_special_tokens=special_tokens), ()
        except BaseException as error:
            if not is_failure(error):
                raise
            # An unknown word and no unknown token, for example, or a regular expression that takes too long.
            got, bad = "text that the tokenizer fails on", self._find_failures(text)
            places = places or [f"text[{row}]" for row in range(len(text))]
            place = places[bad[0]] if bad else "text"
            message = f"{place}: the tokenizer of the model fails on this text: {reason_of(error)}"
            raise Invalid(place, got, "other text", message=message, items=bad) from error

    def _find_failures(self, text: Sequence[str]) -> list[int]:
        """Return the texts that the tokenizer refuses, up to one that takes too long: others may take as long."""
        bad: list[int] = []
        for number, one in enumerate(text):
            try:
                self._whole.encode_batch_fast([one])
            except BaseException as error:
                if not is_failure(error):
                    raise
                bad.append(number)
                if not isinstance(error, Exception):
                    break
        return bad

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


class Tokenizer:
    """A tokenizer file, read on first use so that start-up does not wait for it. It is open before, and may be deleted.

    Args:
        file: in the format of the package `tokenizers`.
        expected: its entry in the manifest; the content is compared with it again.
        ids: number of ids of the model. A text with a token beyond them is an error.

    Raises:
        ArtifactError: the file cannot be opened.
        Unavailable: the process lacks descriptors or memory.

    """

    def __init__(self, file: Path, expected: File, ids: int) -> None:
        self._ids = ids
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
        *,
        in_text: str = "allow",
        places: Sequence[str] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> TokenRequest:
        """Return a request of the tokens of each text, untruncated.

        Args:
            text: the texts.
            max_tokens: most tokens of all texts together.
            spans: whether to return the characters of each token.
            special_tokens: whether to add the tokenizer's special tokens.
            segments: whether to return the segment of each token.
            marks: whether to return which tokens are special.
            in_text: one of `SPECIAL_TOKENS_IN_TEXT`.
            places: of the texts in the request, for error messages; default text[0], text[1], …
            options: further arguments of the request; default: none.

        Raises:
            Invalid: a text has no token, or one beyond the ids of the model, or one that `in_text` forbids; or the
                tokenizer refuses it; or `tokenizers` is not installed.
            TooLarge: too many characters, or more than `max_tokens` tokens.
            ArtifactError: the file is no tokenizer, or differs from the manifest.

        """
        if len(text) > max_tokens:
            raise TooLarge("text", f"{len(text)} texts", f"at most {max_tokens} tokens in a request")
        characters, most = sum(map(len, text)), MAX_CHARACTERS_PER_TOKEN * max_tokens
        if characters > most:
            raise TooLarge("text", f"{characters} characters", f"at most {most} characters in a request")
        only_ids = not (spans or special_tokens or segments or marks) and characters <= MAX_CHARACTERS
        reader = self._plain if in_text == "plain" else self._reader
        found, ids = reader.tokenize(text, spans, special_tokens, only_ids, places)
        counts = list(map(len, found or ids))
        if sum(counts) > max_tokens:
            raise TooLarge("text", f"{sum(counts)} tokens", f"at most {max_tokens} tokens in a request")
        lengths = np.array(counts, np.int64)

        def join(name: str) -> Int64:
            return np.fromiter(chain.from_iterable(getattr(encoding, name) for encoding in found), np.int64)

        rows = TokenRows(join("ids") if found else np.fromiter(chain.from_iterable(ids), np.int64), lengths)
        if 0 in counts or in_text != "allow" or self._has_further_ids:
            added = join("special_tokens_mask") if special_tokens else np.zeros_like(rows.values)
            self._check(text, rows, added == 0, in_text, places or [f"text[{row}]" for row in range(len(text))])
        return TokenRequest(
            input_ids=rows,
            indices={"token_type_ids": TokenRows(join("type_ids"), lengths)} if segments else {},
            special=join("special_tokens_mask").astype(np.bool_) if marks else None,
            spans=np.array([span for encoding in found for span in encoding.offsets], np.int64) if spans else None,
            **options,
        )

    def _check(self, text: Sequence[str], rows: TokenRows, own: Bools, in_text: str, places: Sequence[str]) -> None:
        """Raise Invalid for texts without tokens, and for tokens that the model or `in_text` forbids.

        `own` are the tokens of the texts themselves, bool (T,); the others stand around the texts.
        """
        errors: list[Invalid] = []
        if len(empty := rows.bad_rows(rows.lengths == 0)):
            expected = "text of at least one token"
            errors.append(Invalid(places[empty[0]], repr(text[empty[0]]), expected, items=empty))
        allowed = f"text without this token: its id is beyond {self._ids - 1}, the last one of the model"
        refused = [(rows.values >= self._ids, allowed)]
        if in_text != "allow":
            refused.append(self._find_special(text, rows, own, in_text))
        for wrong, expected in refused:
            if len(bad := np.flatnonzero(wrong)):
                items, token = rows.bad_items(bad), int(rows.values[bad[0]])
                got = f"the token {self._tokenizer.id_to_token(token)} (id {token})"
                errors.append(Invalid(places[items[0]], got, expected, items=items))
        if errors:
            errors[0].items = sorted({int(item) for error in errors for item in error.items})
            try:
                raise errors[0]
            finally:
                errors.clear()  # the traceback holds this frame, and such a cycle would keep the texts

    def _find_special(self, text: Sequence[str], rows: TokenRows, own: Bools, in_text: str) -> tuple[Bools, str]:
        """Return the tokens that `in_text` forbids, bool (T,), and the texts that it allows."""
        special, unknown = self._special
        wrong: Bools = np.isin(rows.values, [*special]) & own
        expected = "text that can be encoded without this token, which is also an ordinary piece of the vocabulary"
        if in_text == "refuse":
            expected = "text without special tokens"
            named = np.array([any(token in one for token in unknown.values()) for one in text])
            wrong = wrong | (np.isin(rows.values, [*unknown]) & own & rows.spread(named).astype(np.bool_))
        return wrong, f"{expected}, since special_tokens_in_text is {in_text}"

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
            check_tokenizer(self._name, parse_tokenizer(self._name, self._read()))
        return_free_memory()

    @cached_property
    def _reader(self) -> AsciiTokenizer:
        return AsciiTokenizer(self._tokenizer)

    @cached_property
    def _plain(self) -> AsciiTokenizer:
        return AsciiTokenizer(_without_special_tokens(self._tokenizer))

    @cached_property
    def _has_further_ids(self) -> bool:
        """Whether an added token has an id beyond those of the model."""
        return max(self._tokenizer.get_added_tokens_decoder(), default=0) >= self._ids

    @cached_property
    def _special(self) -> tuple[dict[int, str], dict[int, str]]:
        """The special tokens by id, with those around a text; and apart from them the one for unknown words."""
        tokenizer = self._tokenizer
        special = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        around = tokenizer.encode("")
        found = zip(around.ids, around.tokens, around.special_tokens_mask, strict=True)
        special |= {id_: token for id_, token, added in found if added}
        try:
            unknown = {token.id for token in tokenizer.model.tokenize(UNKNOWN)} & special.keys()
        except Exception:  # `tokenizers` has no other class: a model without such a token
            unknown = set()
        return special, {id_: special.pop(id_) for id_ in unknown}

    @cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        return parse_tokenizer(self._name, self._read())

    def _read(self) -> bytes:
        try:
            content = os.pread(self._descriptor, self._expected.bytes + 1, 0)
        except OSError as error:
            raise unreadable(self._name, error) from error
        if (found := hashlib.sha256(content).hexdigest()) != self._expected.sha256:
            raise ArtifactError(self._name, f"sha256 {found}", f"sha256 {self._expected.sha256}")
        return content


def _without_special_tokens(tokenizer: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    """Return a tokenizer that takes special tokens in a text for ordinary text. It shares the vocabulary."""
    plain = copy_tokenizer(tokenizer)
    plain.encode_special_tokens = True
    return plain


def copy_tokenizer(tokenizer: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    """Return a copy without truncation and padding. It shares the vocabulary."""
    copy = type(tokenizer)(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(copy, part, value)
    # In the order of their ids, each gets the same id again.
    added = [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    for special, tokens in groupby(added, lambda token: token.special):
        (copy.add_special_tokens if special else copy.add_tokens)([*tokens])
    return copy


def is_failure(error: BaseException) -> bool:
    """Return whether `tokenizers` raised `error`: `Exception` itself, or a panic of Rust, which is no `Exception`."""
    return type(error) is Exception or not isinstance(error, (Exception, *ENDS))


def reason_of(error: BaseException) -> str:
    """Return the message of an error of `tokenizers` in one line."""
    return shorten(" ".join(str(error).split()))


def check_tokenizer(name: str, tokenizer: "tokenizers.Tokenizer") -> int:
    """Run the tokenizer of the file `name` on `SAMPLES`, and return its largest id; -1 without any token.

    Added tokens do not count, unless they stand around every text: only a text that contains one needs its id.

    Raises:
        ArtifactError: it fails on a text. An unknown word may have no token.

    """
    with _naming_failures(name, ""):
        fast = AsciiTokenizer(tokenizer)
        # The ids of the special tokens around a text need not be in the vocabulary.
        ids = chain(tokenizer.get_vocab(with_added_tokens=False).values(), tokenizer.encode("").ids)
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


def parse_tokenizer(name: str, content: bytes) -> "tokenizers.Tokenizer":
    """Return the tokenizer in `content`, the file `name`, without truncation and padding.

    Raises:
        Invalid: `tokenizers` is not installed.
        ArtifactError: the file is no tokenizer.

    """
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
