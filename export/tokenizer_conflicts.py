"""Conflicts of `tokenizer.json` with the other files of its folder, found by the ids of sample texts."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preblock.export.library_tokenizer import (
    ADDED_TOKENS,
    MISTRAL_TYPES,
    NAMED_TOKENS,
    SETTINGS,
    STAGES,
    TOKEN_MAP,
    TokenizerFolder,
    UnbuildableError,
    correct_mistral,
    set_option,
    text_of,
)
from preblock.export.tokenizer_classes import OPTIONS
from preblock.models.checkpoints.weight_files import one_line
from preblock.service.artifacts.names import TOKENIZER
from preblock.service.artifacts.parity import TokenizerConflict
from preblock.service.core.errors import shorten
from preblock.service.runtime.tokenizer import SAMPLES, copy_tokenizer, is_failure

if TYPE_CHECKING:
    import tokenizers

ORDINARY = (
    *("a", "The Quick brown fox, it's 2024!", "Hello, world", "two  spaces", "tab\tand\nline"),
    *("École déjà-vu naïve Straße", "東京は日本語", "Привет мир", "don't we'll DON'T", "eBay pH mL NaOH 1234567"),
    *("``quotes'' and \"more\"", "def f(x):\n    return x  # 10%", "a b c d e f g", "user@example.com/path?q=1"),
)
"""Texts as users send them: without special tokens, and with a visible character at both ends."""
ODD = (" a leading space", "trailing  \n", *SAMPLES)
MAX_TOKEN_SAMPLES = 256
"""Most texts with an added token; equal tokens of both tokenizers give few."""
MAX_COMMON_TOKENS = 8
MARKUP = re.compile(r"[<\[{|(▁#_-]\S*|\S*[>\]}|)_]")
Ids = tuple[int, ...] | None
"""The ids of a text; None if the tokenizer fails on it."""


def find_conflicts(file: Path, tokenizer: "tokenizers.Tokenizer") -> tuple[TokenizerConflict, ...]:
    """Return the conflicts of `tokenizer`, read from `file`: one for each setting, those of ordinary text first.

    A class of transformers that is not compared has none. Files in an unexpected form are one conflict.
    """
    try:
        found = list(_find(TokenizerFolder.read(file, tokenizer)))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, UnbuildableError) as error:
        reason = shorten(" ".join(str(error).split()) or type(error).__name__)
        message = f"the files beside tokenizer.json cannot be compared: {reason}"
        return (_conflict_without_text(SETTINGS, message, ordinary=False),)
    first: dict[str, TokenizerConflict] = {}
    for conflict in sorted(found, key=lambda conflict: not conflict.ordinary):
        first.setdefault(conflict.setting, conflict)
    return tuple(first.values())


def _conflict_without_text(setting: str, message: str, *, ordinary: bool) -> TokenizerConflict:
    return TokenizerConflict(setting=setting, message=message, text="", ids=(), other_ids=(), ordinary=ordinary)


def _find(folder: TokenizerFolder) -> Iterator[TokenizerConflict]:
    others = [name for name in folder.stated.get("fast_tokenizer_files") or () if name != TOKENIZER]
    if others:
        message = f"it names {', '.join(others)}; transformers reads the one for its version in place of {TOKENIZER}"
        yield _conflict_without_text("fast_tokenizer_files", message, ordinary=True)
    elif folder.class_name is not None:
        comparison = _Comparison(folder)
        yield from comparison.compare()
        yield from comparison.find_unused()


@dataclass
class _Sample:
    text: str
    ordinary: bool
    token: str = ""


class _Comparison:
    """The tokenizer of the file and the one of the library, with the ids of the samples by both."""

    def __init__(self, folder: TokenizerFolder) -> None:
        self._folder = folder
        self._file = folder.tokenizer
        self._samples = list(self._make_samples())
        self._ids = self._encode(self._file)
        self._library: tokenizers.Tokenizer | None = None

    def compare(self) -> Iterator[TokenizerConflict]:
        """Yield a conflict for each stage that changes the ids of a sample for good."""
        folder, current = self._folder, copy_tokenizer(self._file)
        steps: list[tuple[str, list[Ids], list[Ids]]] = []
        before = self._ids
        for name, stage in STAGES:
            try:
                changed = stage(current, folder)
            except UnbuildableError as error:
                yield self._describe_failure(error)
                return
            if changed is not None:
                current, after = changed, self._encode(changed)
                steps.append((name, before, after))
                before = after
        self._library = current
        for name, earlier, later in steps:
            changes = [
                index
                for index, ids in enumerate(self._ids)
                if earlier[index] != later[index] and ids != before[index] and ids is not None
            ]
            if changes:
                yield from self._describe(name, changes, before)

    def find_unused(self) -> Iterator[TokenizerConflict]:
        """Yield a conflict for each setting that transformers 5 does not use, although it asks for other ids."""
        if self._library is None:
            return
        yield from self._find_frame()
        yield from self._find_options()
        yield from self._find_mistral()
        yield from self._find_post_processor()
        yield from self._find_padding()
        yield from self._find_token_ids()
        yield from self._find_token_map()

    def _make_samples(self) -> Iterator[_Sample]:
        added: dict[str, Mapping[str, Any]] = {}
        for token in (*(self._folder.document.get("added_tokens") or ()), *self._folder.decoder):
            added.setdefault(token["content"], token)
        named = {text: {"special": True} for text in map(text_of, self._folder.special_tokens())}
        known = dict.fromkeys(token["content"] for token in self._folder.document.get("added_tokens") or ())
        special = {text for text, token in (added | named).items() if token.get("special") or MARKUP.fullmatch(text)}
        for text in ORDINARY:
            yield _Sample(text, not any(token in text for token in special))
        yield from (_Sample(text, False) for text in ODD)
        common = [text for text in added if text in known][:MAX_COMMON_TOKENS]
        stated = [token["content"] for token in self._folder.decoder]
        further = dict.fromkeys(text for text in (*named, *stated) if text not in known)
        lost = (text for text in known if text not in stated) if self._folder.recipe else ()
        for text in [*dict.fromkeys((*common, *named, *further, *lost))][:MAX_TOKEN_SAMPLES]:
            yield _Sample(f"a {text} b", text not in special, text)
            yield _Sample(f"a{text}b", text not in special, text)

    def _encode(self, tokenizer: "tokenizers.Tokenizer") -> list[Ids]:
        return [encode(tokenizer, sample.text) for sample in self._samples]

    def _describe(self, stage: str, changes: Sequence[int], final: Sequence[Ids]) -> Iterator[TokenizerConflict]:
        """Yield the conflicts of a stage: one, or one for each source of added tokens."""
        groups: dict[str, list[int]] = {}
        for index in changes:
            setting = self._name_token(self._samples[index].token) if stage == "added tokens" else stage
            groups.setdefault(setting, []).append(index)
        others = groups.get("added tokens", [])
        if len(groups) > 1 and not any(self._samples[index].ordinary for index in others):
            groups.pop("added tokens", None)
        for setting, indices in groups.items():
            first = min(indices, key=self._rank)
            sample = self._samples[first]
            message = self._explain(stage, setting, sample)
            yield self._conflict(setting, message, sample.text, final[first], ordinary=sample.ordinary)

    def _rank(self, index: int) -> tuple[bool, bool, int]:
        """Return a key that sorts samples by their use as an example: ordinary and short ones first."""
        sample = self._samples[index]
        return not sample.ordinary, not sample.text, len(sample.text)

    def _name_token(self, token: str) -> str:
        """Return the setting or the file that an added token comes from."""
        folder = self._folder
        if not token:
            return "added tokens"
        decoder = folder.stated.get("added_tokens_decoder")
        if isinstance(decoder, Mapping):
            listed = any(entry.get("content") == token for entry in decoder.values())
            if listed or not any(token == text_of(special) for special in folder.special_tokens()):
                return "added_tokens_decoder"
        places = [(folder.stated, SETTINGS)] + ([(folder.token_map, TOKEN_MAP)] if decoder is None else [])
        for settings, file in places:
            for name in ("additional_special_tokens", "extra_special_tokens"):
                values = settings.get(name) or []
                values = values.values() if isinstance(values, Mapping) else values
                if any(token == text_of(value) for value in values):
                    return name if file == SETTINGS else TOKEN_MAP
            for name, value in settings.items():
                if name.endswith("_token") and isinstance(value, (str, dict)) and text_of(value) == token:
                    return name if file == SETTINGS else TOKEN_MAP
        return ADDED_TOKENS if token in folder.added else "tokenizer_class"

    def _explain(self, stage: str, setting: str, sample: _Sample) -> str:
        name, stated = self._folder.class_name, self._folder.stated
        library = f"{name} of transformers 5"
        if stage in stated and stage != "tokenizer_class":
            return f"{SETTINGS} has {json.dumps(stated[stage])}; {library} applies it, and tokenizer.json does not"
        if stage == "tokenizer_class":
            return f"{library} replaces model, normalizer and pre-tokenizer of tokenizer.json; version 4 kept them"
        if stage == "post_processor":
            return f"{library} puts its own special tokens around a text; version 4 took those of tokenizer.json"
        if stage == "added tokens":
            return self._explain_token(library, setting, sample.token)
        return f"{SETTINGS} does not state it, so {library} applies its default, and tokenizer.json does not"

    def _explain_token(self, library: str, setting: str, token: str) -> str:
        if not token:
            return f"{library} finds added tokens elsewhere in a text than tokenizer.json"
        source = "its defaults" if setting == "tokenizer_class" else setting
        if self._file.token_to_id(token) is None:
            return f"{library} adds {token!r} from {source}; tokenizer.json lacks it"
        if self._library is not None and self._library.token_to_id(token) is None:
            return f"{library} lacks {token!r}, as {source} does; tokenizer.json adds it"
        return f"{library} finds {token!r} elsewhere in a text, by {source}, than tokenizer.json"

    def _describe_failure(self, error: Exception) -> TokenizerConflict:
        message = f"{self._folder.class_name} of transformers 5 cannot be built from tokenizer.json: {one_line(error)}"
        return self._conflict("tokenizer_class", message, self._text, (), ordinary=True)

    def _conflict(
        self, setting: str, message: str, text: str, other: Iterable[int] | None, *, ordinary: bool = False
    ) -> TokenizerConflict:
        ids, other_ids = encode(self._file, text) or (), tuple(other or ())
        return TokenizerConflict(
            setting=setting, message=message, text=text, ids=ids, other_ids=other_ids, ordinary=ordinary
        )

    @cached_property
    def _text(self) -> str:
        """An ordinary text with a token."""
        return next((s.text for s, ids in zip(self._samples, self._ids, strict=True) if ids and s.ordinary), "a")

    def _find_frame(self) -> Iterator[TokenizerConflict]:
        """Compare `add_bos_token` and `add_eos_token` with the tokens around a text."""
        assert self._library is not None
        stated, text = self._folder.stated, self._text
        plain = encode(self._library, text, special=False) or ()
        framed = encode(self._library, text) or ()
        wanted, wrong = list(plain), []
        for name, place in (("bos_token", 0), ("eos_token", -1)):
            setting, token = stated.get(f"add_{name}"), self._folder.token_settings.get(name)
            index = self._library.token_to_id(token) if isinstance(token, str) else None
            has = len(framed) > len(plain) and framed[place] == index
            if index is not None and (has if setting is None else setting):
                wanted.insert(0 if place == 0 else len(wanted), index)
            if index is not None and isinstance(setting, bool) and setting != has:
                wrong.append((f"add_{name}", token, setting))
        for setting, token, value in wrong:
            does = "adds no" if value else "adds"
            message = (
                f"{SETTINGS} has {json.dumps(value)}, but tokenizer.json {does} {token!r}; transformers 5 ignores the "
                "setting"
            )
            yield self._conflict(setting, message, text, wanted)

    def _find_options(self) -> Iterator[TokenizerConflict]:
        """Compare settings of other classes with the fields of the file."""
        recipe = self._folder.recipe
        for option, key in OPTIONS.items():
            value = self._folder.stated.get(option)
            if not isinstance(value, bool) or (recipe and option in recipe.options):
                continue
            tokenizer = copy_tokenizer(self._file)
            if set_option(tokenizer, key, value):
                index = next((i for i, ids in enumerate(self._encode(tokenizer)) if ids != self._ids[i]), None)
                if index is not None:
                    text = self._samples[index].text
                    name = self._folder.class_name
                    message = f"{SETTINGS} has {json.dumps(value)}, but {name} of transformers 5 ignores it"
                    yield self._conflict(option, message, text, encode(tokenizer, text))

    def _find_mistral(self) -> Iterator[TokenizerConflict]:
        """Compare the pattern of a Mistral with the right one."""
        folder = self._folder
        if folder.config.get("model_type") not in MISTRAL_TYPES or folder.settings.get("fix_mistral_regex") is True:
            return
        tokenizer = correct_mistral(copy_tokenizer(self._file), folder)
        if tokenizer is None:
            return
        for index, ids in enumerate(self._encode(tokenizer)):
            if ids != self._ids[index] and self._samples[index].ordinary:
                message = (
                    "the pre-tokenizer has the wrong pattern of checkpoints of Mistral; transformers 5 keeps it "
                    "unless fix_mistral_regex is true"
                )
                yield self._conflict("fix_mistral_regex", message, self._samples[index].text, ids)
                return

    def _find_post_processor(self) -> Iterator[TokenizerConflict]:
        """Compare the ids in the post-processor with the vocabulary."""
        if self._folder.recipe and self._folder.recipe.frame:
            return  # replaced
        processor = self._folder.document.get("post_processor") or {}
        for part in processor.get("processors") or [processor]:
            tokens = [part[name] for name in ("sep", "cls") if name in part]
            for entry in (part.get("special_tokens") or {}).values():
                tokens += zip(entry["tokens"], entry["ids"], strict=False)
            for token, index in tokens:
                known = self._file.token_to_id(token)
                if known != index:
                    message = f"it adds {token!r} with id {index}, and the vocabulary has {known}"
                    yield self._conflict("post_processor", message, token, [] if known is None else [known])

    def _find_padding(self) -> Iterator[TokenizerConflict]:
        """Compare the padding of the file with the vocabulary."""
        padding = self._folder.document.get("padding")
        if not padding:
            return
        token, index = padding["pad_token"], padding["pad_id"]
        known = self._file.token_to_id(token)
        if known is not None and known != index:
            yield self._conflict(
                "padding", f"tokenizer.json pads with id {index}, and {token!r} is {known}", token, [index]
            )

    def _find_token_ids(self) -> Iterator[TokenizerConflict]:
        """Compare the stated ids of added tokens with those that they get."""
        assert self._library is not None
        decoder = self._folder.stated.get("added_tokens_decoder")
        stated = {token["content"]: int(index) for index, token in (decoder or {}).items()}
        for name, ids in (("added_tokens_decoder", stated), (ADDED_TOKENS, self._folder.added)):
            for token, index in ids.items():
                known = self._library.token_to_id(token)
                if known != index:
                    message = f"{token!r} has id {index} there, and {known} in transformers 5"
                    yield self._conflict(name, message, token, [index])
                    break

    def _find_token_map(self) -> Iterator[TokenizerConflict]:
        """Compare the named tokens of `special_tokens_map.json` with those of `tokenizer_config.json`."""
        folder = self._folder
        for name in NAMED_TOKENS:
            first, second = folder.token_map.get(name), folder.stated.get(name)
            if not first or not second or text_of(first) == text_of(second):
                continue
            wins = SETTINGS if "added_tokens_decoder" in folder.stated else TOKEN_MAP
            message = f"{name} is {text_of(first)!r}, in {SETTINGS} {text_of(second)!r}; transformers 5 reads {wins}"
            index = self._file.token_to_id(text_of(first))
            yield self._conflict(TOKEN_MAP, message, text_of(second), [] if index is None else [index])
            return


def encode(tokenizer: "tokenizers.Tokenizer", text: str, special: bool = True) -> Ids:
    """Return the ids of a text; None if the tokenizer fails on it."""
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=special).ids)
    except BaseException as error:
        if not is_failure(error):
            raise
        return None
