"""Finds and reads a static embedding model of a library, by the rows of `STATICS`.

Letters: V token ids, N rows and D width of the table.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from preblock.models.checkpoints.divided_tensors import find_whole
from preblock.models.checkpoints.other_names import describe_other_name
from preblock.models.checkpoints.weight_files import (
    CheckpointError,
    WeightFile,
    check_place,
    explain_errors,
    read_document,
    read_json,
)
from preblock.models.config import FrontEndConfig
from preblock.models.families.static import MODULE, STATICS, StaticFamily
from preblock.models.frontend_data import Array, FrontEndData
from preblock.models.frontend_file import STORED_TYPES, WEIGHTS
from preblock.models.steps import Step, Tokens, Weights

MODULES = "modules.json"
"""The list of modules in a folder of sentence-transformers."""
SETTINGS = "config_sentence_transformers.json"
"""The settings of sentence-transformers, such as prompts."""
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WORDLLAMA_WEIGHTS = re.compile(r"(?P<config>\w+)_[0-9]+\.safetensors")
"""A file in the folder `weights` of wordllama: the name of a config, and the width. Binary tables have other names."""
TABLE_TYPES = (*STORED_TYPES, "int8")
WEIGHT_TYPES = (*STORED_TYPES, "float64")
"""Allowed types: all are float32 afterwards. The weights of model2vec are float64 if its statistics are."""
MAPPING_TYPES = ("int64", "int32")


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
    for file in found[0]:
        check_place(folder, Path(file).parent.name, str(folder))
    return StaticLayout(name="wordllama", weights=weights, tokenizer=tokenizer, record=tokenizer, normalize=True)


def _find_module(folder: Path, modules: list[tuple[str, str]]) -> StaticLayout:
    """Return the layout of a folder of sentence-transformers, given the class and the path of each module."""
    (_, part), *others = modules
    kinds = [kind for kind, _ in others]
    if kinds not in ([], ["Normalize"]):
        raise CheckpointError(f"{MODULES}: after {MODULE} comes {', '.join(kinds)}, understood is Normalize")
    check_place(folder, part, MODULES)
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


@dataclass(frozen=True, kw_only=True)
class StaticModel:
    """A static embedding model.

    Args:
        frontend: the vector of each token.
        normalize: whether the mean is divided by its Euclidean norm.
        ignored_ids: ids left out of the mean.

    """

    frontend: FrontEndData
    normalize: bool
    ignored_ids: tuple[int, ...]


def read_static(folder: Path, layout: StaticLayout) -> StaticModel:
    """Build the front-end of the static embedding model in `folder`: the table, and the weights if the file has them.

    Rows shared by several ids through a mapping are repeated, so that the front-end has a row for each id.

    Raises:
        CheckpointError: a file is missing or broken, or two of them disagree.

    """
    family, tokenizer = STATICS[layout.name], read_json(folder / layout.tokenizer)
    tensors = _read_tensors(folder / layout.weights, family)
    table = tensors["tokens.weight"]
    try:
        last = _last_id(tokenizer)
        unknown = _unknown_id(tokenizer) if family.drops_unknown else None
        limit = family.limit(layout.config, tokenizer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{layout.tokenizer}: no file of the package tokenizers") from error
    if last >= len(table):
        raise CheckpointError(
            f"{folder}: tensors and tokenizer disagree: the tokenizer has the id {last}, the tensors end at "
            f"{len(table) - 1}"
        )
    steps: list[Step] = [Tokens(rows=len(table), width=table.shape[1])]
    if "weights.weight" in tensors:
        steps.append(Weights(rows=len(table)))
    with explain_errors(folder, (ValueError,)):
        config = FrontEndConfig(
            family=layout.name, steps=tuple(steps), max_len=limit, lookup=len(steps), consumer_scales=False
        )
        frontend = FrontEndData(config, tensors).check()
    ignored = () if unknown is None else (unknown,)
    return StaticModel(frontend=frontend, normalize=layout.normalize, ignored_ids=ignored)


def static_files_needed(layout: StaticLayout) -> list[str]:
    """Return the files opened by `read_static`, relative to its folder; they need not exist yet."""
    return [layout.weights, layout.tokenizer]


def _read_tensors(file: Path, family: StaticFamily) -> dict[str, Array]:
    """Return the table, float32 (V, D), and the weights, float32 (V, 1), if the file has them."""
    weights = WeightFile(file)
    names = weights.keys()
    key = find_whole(file.parent, names, "", family.tables, ("mapping", "weights"))
    if key is None:
        found = describe_other_name(names, family.tables)
        raise CheckpointError(f"{file}: no tensor {' or '.join(family.tables)}{found and '; ' + found}")
    table = weights.get(key, TABLE_TYPES)
    mapping = weights.get("mapping", MAPPING_TYPES) if "mapping" in names else None
    factors = weights.get("weights", WEIGHT_TYPES) if "weights" in names else None
    _check_shape(file, key, table, 2)
    if mapping is not None:
        _check_shape(file, "mapping", mapping, 1)
        if not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
            raise CheckpointError(f"{file}: mapping leads beyond the {len(table)} rows of {key}")
        table = table[mapping]
    tensors = {"tokens.weight": table.astype(np.float32, copy=False)}
    if factors is not None:
        _check_shape(file, "weights", factors, 1)
        if len(factors) != len(table):
            raise CheckpointError(f"{file}: weights has {len(factors)} values, expected {len(table)}, one for each id")
        tensors["weights.weight"] = factors.astype(np.float32, copy=False).reshape(-1, 1)
    return tensors


def _check_shape(file: Path, key: str, tensor: Array, dimensions: int) -> None:
    if tensor.ndim != dimensions or not tensor.size:
        raise CheckpointError(
            f"{file}: {key} has the shape {tuple(tensor.shape)}, expected {dimensions} dimensions of 1 or more"
        )


def _last_id(tokenizer: Mapping[str, Any]) -> int:
    """Return the largest id of a tokenizer, without those of added tokens, which only some texts need."""
    vocabulary = tokenizer["model"]["vocab"]
    return int(max(vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]))


def _unknown_id(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the id of the unknown token; None for a tokenizer without one.

    Unigram states its id, every other kind its text.
    """
    model = tokenizer["model"]
    if isinstance(model["vocab"], list):
        stated: int | None = model.get("unk_id")
        return stated
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    found: int | None = (model["vocab"] | added).get(model.get("unk_token"))
    return found
