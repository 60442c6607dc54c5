"""The tokenizer that transformers 5 builds from a folder, by the package `tokenizers` alone.

`tokenizer.json` is one of its sources: the class decides which parts of it count, and `tokenizer_config.json`,
`special_tokens_map.json` and `added_tokens.json` add tokens. `STAGES` applies them one after another.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preblock.export.options import TOKENIZER_SETTINGS
from preblock.export.tokenizer_classes import CLASSES, MISTRAL_SPLIT, OPTIONS, PLAIN, Part, TokenizerClass, find_class
from preblock.models.checkpoints.static_reader import CONFIG
from preblock.models.checkpoints.weight_files import read_json
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.tokenizer import parse_tokenizer

if TYPE_CHECKING:
    import tokenizers

SETTINGS, TOKEN_MAP, ADDED_TOKENS = TOKENIZER_SETTINGS
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
MIN_MISTRAL_VOCABULARY = 100_000
"""The library looks for the wrong pattern of Mistral above this size only."""
FIXED_MAJOR = 5
"""The version of transformers from which on a saved Mistral has the right pattern."""
FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""The fields of an added token; the package prints a line for any other."""
Token = str | dict[str, Any]
"""The text of a token, or its fields as in `added_tokens`."""


def text_of(token: Token) -> str:
    """Return the text of a token."""
    return token if isinstance(token, str) else str(token["content"])


@dataclass
class TokenizerFolder:
    """The files of a folder that describe its tokenizer.

    Args:
        tokenizer: of `tokenizer.json`.
        document: the content of this file.
        config: `config.json`.
        stated: `tokenizer_config.json`; empty without one.
        token_map: `special_tokens_map.json`; empty without one.
        added: `added_tokens.json`; empty without one.

    """

    tokenizer: "tokenizers.Tokenizer"
    document: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)
    token_map: dict[str, Any] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, tokenizer: "tokenizers.Tokenizer") -> "TokenizerFolder":
        """Read `file` of `tokenizer` and those beside it; raise CheckpointError for one that is no JSON object."""
        files = [file, *(file.parent / name for name in (CONFIG, *TOKENIZER_SETTINGS))]
        return cls(tokenizer, *(read_json(file) if file.exists() else {} for file in files))

    @cached_property
    def class_name(self) -> str | None:
        """The class that AutoTokenizer builds; None if it is not compared."""
        return find_class(self.config, self.stated, '"ByteLevel"' in json.dumps(self._parts))

    @property
    def _parts(self) -> dict[str, Any]:
        return {name: part for name, part in self.document.items() if name not in ("model", "added_tokens")}

    @cached_property
    def recipe(self) -> TokenizerClass | None:
        """The parts that the class rebuilds; None for the class that keeps those of the file."""
        return CLASSES.get(str(self.class_name))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings with the defaults of the class. `added_tokens_decoder` excludes `special_tokens_map.json`."""
        found = dict(self.stated)
        if not found.get("extra_special_tokens"):
            found["extra_special_tokens"] = found.pop("additional_special_tokens", None)
        if "added_tokens_decoder" not in found:
            found |= self.token_map
        pad = (self.document.get("padding") or {}).get("pad_token")
        if pad and self.class_name in (PLAIN, "LlamaTokenizer"):  # those without a default
            found = {"pad_token": pad} | found
        return {**self.recipe.tokens, **found} if self.recipe else found

    @cached_property
    def token_settings(self) -> dict[str, Any]:
        """The settings, with the text of each named token."""
        texts = {name: text_of(value) for name in NAMED_TOKENS if (value := self.settings.get(name))}
        return self.settings | texts

    @cached_property
    def decoder(self) -> list[dict[str, Any]]:
        """The added tokens in the order of their stated ids, from the file that counts."""
        if "added_tokens_decoder" in self.stated:
            found = {int(index): dict(token) for index, token in self.stated["added_tokens_decoder"].items()}
        else:
            special = set(map(text_of, self.special_tokens(named_only=True)))
            found = {
                index: {"content": text, "special": text in special, "normalized": text not in special}
                for text, index in self.added.items()
            }
            found |= {token["id"]: token for token in self.document.get("added_tokens") or []}
        return [token for _, token in sorted(found.items())]

    def special_tokens(self, named_only: bool = False) -> Iterator[Token]:
        """Yield the special tokens of the settings: the usual attributes, those of the model, and further ones."""
        settings, extra = self.settings, self.settings.get("extra_special_tokens") or []
        yield from (settings[name] for name in NAMED_TOKENS if settings.get(name))
        if not named_only:
            names = (name for name in settings if name.endswith("_token") and name not in NAMED_TOKENS)
            yield from (settings[name] for name in names if isinstance(settings[name], (str, dict)))
        if isinstance(extra, Mapping):
            yield from extra.values()
            extra = []
        if self.recipe and not named_only:
            extra = extra or self.recipe.named(settings)
        yield from extra or settings.get("additional_special_tokens") or []

    @property
    def splits_mistral(self) -> bool:
        """Whether transformers suspects the wrong pattern: a model type of Mistral, saved by a version before 5."""
        version = str(self.config.get("transformers_version") or "0").partition(".")[0]
        kind = self.config.get("model_type")
        return version.isdecimal() and int(version) < FIXED_MAJOR and (kind is None or kind in MISTRAL_TYPES)


class UnbuildableError(Exception):
    """transformers fails to build the tokenizer; the message gives the reason."""


Stage = Callable[["tokenizers.Tokenizer", TokenizerFolder], "tokenizers.Tokenizer | None"]
"""Changes a tokenizer, or returns another one; None if it changes nothing."""


def _parse(document: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    try:
        return parse_tokenizer("tokenizer.json", json.dumps(document).encode())
    except ArtifactError as error:
        raise UnbuildableError(error.got) from error


def set_parts(tokenizer: "tokenizers.Tokenizer", normalizer: Part, pre_tokenizer: Part) -> None:
    """Replace the normalizer and the pre-tokenizer."""
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    empty: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    made = _parse({**empty, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer})
    tokenizer.normalizer = made.normalizer
    tokenizer.pre_tokenizer = made.pre_tokenizer


def parts_of(tokenizer: "tokenizers.Tokenizer") -> tuple[Part, Part]:
    """Return the normalizer and the pre-tokenizer."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    first, second = (None if part is None else json.loads(part.__getstate__()) for part in parts)
    return first, second


def set_option(tokenizer: "tokenizers.Tokenizer", key: str, value: Any) -> bool:
    """Set a field of normalizer and pre-tokenizer wherever it is one, and return whether any changed."""
    before = parts_of(tokenizer)
    after = copy.deepcopy(before)
    for part in filter(None, after):
        for each in part.get("normalizers") or part.get("pretokenizers") or [part]:
            each.update({key: value} if key in each else {})
    if after != before:
        set_parts(tokenizer, *after)
    return after != before


def option_stage(option: str) -> Stage:
    """Return the stage that applies one setting to the parts of the file."""

    def apply(tokenizer: "tokenizers.Tokenizer", folder: TokenizerFolder) -> "tokenizers.Tokenizer | None":
        if folder.recipe is None or option not in folder.recipe.options:
            return None
        key, settings = OPTIONS[option], folder.settings
        value = (folder.recipe.normalizer(settings, None) or {}).get(key, bool(settings.get(option)))
        return tokenizer if set_option(tokenizer, key, value) else None

    return apply


def rebuild(tokenizer: "tokenizers.Tokenizer", folder: TokenizerFolder) -> "tokenizers.Tokenizer | None":
    """Replace model, normalizer and pre-tokenizer by those of the class; added tokens stay."""
    recipe, document, settings = folder.recipe, folder.document, folder.token_settings
    if recipe is None:
        return None
    normalizer, pre_tokenizer = recipe.normalizer(settings, document.get("normalizer")), recipe.pre_tokenizer(settings)
    model = _build_model(recipe, document["model"], settings)
    if any((document["model"].get(name) or None) != (value or None) for name, value in model.items()):
        return _parse({**document, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model})
    set_parts(tokenizer, normalizer, pre_tokenizer)
    return tokenizer


def _build_model(recipe: TokenizerClass, model: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    vocabulary = model.get("vocab")
    if recipe.model == "Unigram":
        if not isinstance(vocabulary, list):
            raise UnbuildableError(f"the model is {model.get('type')}, expected Unigram")
        unknown = recipe.unknown(settings, vocabulary)
        return {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, **recipe.parameters}
    if isinstance(vocabulary, list):
        vocabulary = {entry[0] if isinstance(entry, list) else entry: index for index, entry in enumerate(vocabulary)}
    parameters = {
        name: str(settings.get("unk_token")) if value == "unk_token" else value
        for name, value in recipe.parameters.items()
    }
    merges = {"merges": model.get("merges") or []} if recipe.model == "BPE" else {}
    return {"type": recipe.model, "vocab": vocabulary, **merges, **parameters}


def add_tokens(tokenizer: "tokenizers.Tokenizer", folder: TokenizerFolder) -> "tokenizers.Tokenizer":
    """Add the tokens of the settings. A rebuilt tokenizer has no others; a plain one has those of its file too."""
    from tokenizers import Tokenizer

    result = tokenizer
    if folder.recipe:
        result = Tokenizer(tokenizer.model)
        for name in ("normalizer", "pre_tokenizer", "post_processor"):
            if part := getattr(tokenizer, name):
                setattr(result, name, part)
    special = list(folder.special_tokens())
    named = set(map(text_of, special))
    tokens = [_make_token(token, text_of(token) in named) for token in folder.decoder]
    known = {token.content for token in (*tokens, *result.get_added_tokens_decoder().values())}
    # The same text as a string and as an object counts twice; the last one wins.
    further = [token for index, token in enumerate(special) if token not in special[:index]]
    tokens += [_make_token(token, True, folder) for token in further if text_of(token) not in known]
    result.add_tokens(tokens)
    if folder.recipe and folder.recipe.adds_again:
        result.add_tokens([_make_token(text_of(token), True) for token in special])
    return result


def _make_token(token: Token, special: bool, folder: TokenizerFolder | None = None) -> "tokenizers.AddedToken":
    from tokenizers import AddedToken

    if isinstance(token, str):
        mask = bool(folder and folder.recipe and folder.recipe.lstrip_mask and token == folder.settings["mask_token"])
        return AddedToken(token, special=True, lstrip=mask)
    fields = {name: value for name, value in token.items() if name in FIELDS}
    fields["special"] = special or fields.get("special", False)
    return AddedToken(token["content"], **fields)


def split_special(tokenizer: "tokenizers.Tokenizer", folder: TokenizerFolder) -> "tokenizers.Tokenizer | None":
    """Treat special tokens in a text as text, if the settings say so."""
    if not folder.settings.get("split_special_tokens"):
        return None
    tokenizer.encode_special_tokens = True
    return tokenizer


def frame_text(tokenizer: "tokenizers.Tokenizer", folder: TokenizerFolder) -> "tokenizers.Tokenizer | None":
    """Put the tokens of the class around a text, in place of those of the file."""
    from tokenizers.processors import TemplateProcessing

    if folder.recipe is None or folder.recipe.frame is None:
        return None
    before, after = (folder.token_settings.get(str(name)) for name in folder.recipe.frame)
    tokens = {token: tokenizer.token_to_id(token) for token in (before, after) if token}
    tokenizer.post_processor = TemplateProcessing(
        single=" ".join(filter(None, (before, "$A", after))), special_tokens=list(tokens.items())
    )
    return tokenizer


def fix_mistral(tokenizer: "tokenizers.Tokenizer", folder: TokenizerFolder) -> "tokenizers.Tokenizer | None":
    """Replace the wrong pattern of Mistral's tokenizers, if the settings say so."""
    return correct_mistral(tokenizer, folder) if folder.settings.get("fix_mistral_regex") is True else None


def correct_mistral(tokenizer: "tokenizers.Tokenizer", folder: TokenizerFolder) -> "tokenizers.Tokenizer | None":
    """Replace the pattern where the library does: for large vocabularies of a Mistral saved by a version before 5."""
    normalizer, stored = parts_of(tokenizer)
    if stored is None or not folder.splits_mistral or tokenizer.get_vocab_size() <= MIN_MISTRAL_VOCABULARY:
        return None
    if stored["type"] == "Metaspace":
        stored = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    rest = stored["pretokenizers"][1:] if stored["type"] == "Sequence" else [stored]
    split = {"type": "Split", "pattern": {"Regex": MISTRAL_SPLIT}, "behavior": "Isolated", "invert": False}
    set_parts(tokenizer, normalizer, {"type": "Sequence", "pretokenizers": [split, *rest]})
    return tokenizer


STAGES: tuple[tuple[str, Stage], ...] = (
    *((option, option_stage(option)) for option in OPTIONS),
    ("tokenizer_class", rebuild),
    ("added tokens", add_tokens),
    ("split_special_tokens", split_special),
    ("post_processor", frame_text),
    ("fix_mistral_regex", fix_mistral),
)
"""The steps from `tokenizer.json` to the tokenizer of the library."""
