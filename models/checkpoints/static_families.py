"""The static table: libraries of static embedding models, and the layout of their folders.

Such a model is a table of tokens. Its sentence embedding is the mean of their vectors. Imports no torch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preblock.models.checkpoints.weight_files import CheckpointError, read_document, read_json
from preblock.models.frontend_file import WEIGHTS

MODULES = "modules.json"
"""The list of modules in a folder of sentence-transformers."""
SETTINGS = "config_sentence_transformers.json"
"""The settings of sentence-transformers, such as prompts."""
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
MODULE = "StaticEmbedding"


@dataclass(frozen=True, kw_only=True)
class StaticFamily:
    """One row: a library of static embedding models.

    Args:
        tables: keys of the table in the file; the first one found is used.
        limit: most tokens of a text before the library cuts it, given `config.json` and `tokenizer.json`; None
            without a limit.
        drops_unknown: whether the mean leaves out the unknown token of the tokenizer.

    """

    tables: tuple[str, ...]
    limit: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    drops_unknown: bool


STATICS: dict[str, StaticFamily] = {
    "model2vec": StaticFamily(
        tables=("embeddings", "embedding.weight"),
        limit=lambda config, _: config.get("max_length", 512),
        drops_unknown=True,
    ),
    MODULE: StaticFamily(
        tables=("embedding.weight", "embeddings"),
        limit=lambda _, tokenizer: (tokenizer.get("truncation") or {}).get("max_length"),
        drops_unknown=False,
    ),
    "wordllama": StaticFamily(
        tables=("embedding.weight",), limit=lambda _config, _tokenizer: None, drops_unknown=False
    ),
}
"""Read from model2vec 0.10, sentence-transformers 6.2 and wordllama 0.4."""
WORDLLAMA_WEIGHTS = re.compile(r"(?P<config>\w+)_[0-9]+\.safetensors")
"""A file in the folder `weights` of wordllama: the name of a config, and the width. Binary tables have other names."""


@dataclass(frozen=True, kw_only=True)
class StaticLayout:
    """The parts of a folder with a static embedding model.

    Args:
        name: of its row in `STATICS`.
        weights: file of the tensors, relative to the folder.
        tokenizer: file of the tokenizer, relative to the folder.
        config: content of `config.json`; empty without one.
        record: file to identify the model by: `config.json`, else `modules.json`, else the tokenizer.
        normalize: whether the mean is divided by its Euclidean norm, as the library does it.

    """

    name: str
    weights: str = WEIGHTS
    tokenizer: str = TOKENIZER
    config: Mapping[str, Any] = field(default_factory=dict)
    record: str
    normalize: bool


def find_static(folder: Path) -> StaticLayout | None:
    """Return the layout of the static embedding model in `folder`; None if it holds no such model.

    `config.json` names model2vec as its `model_type`, or `modules.json` begins with a StaticEmbedding. Both files stand
    in a folder saved by model2vec; sentence-transformers writes no `config.json` for such a model. The package and the
    cache of wordllama have neither: a file in `weights` and a file in `tokenizers` belong together by their names.

    Raises:
        CheckpointError: a file is damaged, the model has a further module or a default prompt, or there are several.

    """
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    model_type = config.get("model_type")
    if model_type is None and (folder / MODULES).is_file():
        modules = _read_modules(folder / MODULES)
        if modules and modules[0][0] == MODULE:
            if not config:
                return _find_module(folder, modules)
            model_type = "model2vec"
    if model_type is None and not config:
        return _find_wordllama(folder)
    if model_type != "model2vec":
        return None
    normalize = config.get("normalize", False)
    if type(normalize) is not bool:
        raise CheckpointError(f"{CONFIG}: normalize is {normalize!r}, understood is true or false")
    return StaticLayout(name="model2vec", config=config, record=CONFIG, normalize=normalize)


def _find_wordllama(folder: Path) -> StaticLayout | None:
    """Return the layout of a folder of wordllama; None for any other folder.

    The mean is normalized, as by `embed(norm=True)`: the library compares texts by cosine similarity.
    """
    found = [
        (f"weights/{file.name}", tokenizer)
        for file in sorted(folder.glob("weights/*.safetensors"))
        if (name := WORDLLAMA_WEIGHTS.fullmatch(file.name))
        and (folder / (tokenizer := f"tokenizers/{name['config']}_tokenizer_config.json")).is_file()
    ]
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(weights for weights, _ in found)
        raise CheckpointError(f"{folder}: several tables of wordllama ({names}), expected one; copy one into a folder")
    [(weights, tokenizer)] = found
    return StaticLayout(name="wordllama", weights=weights, tokenizer=tokenizer, record=tokenizer, normalize=True)


def _find_module(folder: Path, modules: list[tuple[str, str]]) -> StaticLayout:
    """Return the layout of a folder of sentence-transformers, given the class and the path of each module."""
    (_, part), *others = modules
    kinds = [kind for kind, _ in others]
    if kinds not in ([], ["Normalize"]):
        raise CheckpointError(f"{MODULES}: after {MODULE} comes {', '.join(kinds)}, understood is Normalize")
    if Path(part).is_absolute() or ".." in Path(part).parts:
        raise CheckpointError(f"{MODULES}: the path {part!r} lies outside the folder")
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    if (prompt := settings.get("default_prompt_name")) is not None:
        raise CheckpointError(f"{SETTINGS}: default_prompt_name is {prompt!r}, understood is null: no prompt is added")
    weights, tokenizer = ((Path(part) / name).as_posix() for name in (WEIGHTS, TOKENIZER))
    return StaticLayout(name=MODULE, weights=weights, tokenizer=tokenizer, record=MODULES, normalize=bool(kinds))


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """Return the class and the path of each module, in order."""
    try:
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in read_document(file)]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: expected a list of modules with a type and a path") from error
