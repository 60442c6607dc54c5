"""Reads the front-end of a published checkpoint: `config.json` and safetensors files, by the family table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from preblock.models.checkpoints.family_lookup import family_of, section_of
from preblock.models.checkpoints.ngram_tensors import TableTensor, locate_ngram_tables
from preblock.models.checkpoints.rotary_reader import MissingLengthError, as_stored, read_rotary
from preblock.models.checkpoints.step_tensors import ByteCount, files_of_steps, read_tensors
from preblock.models.checkpoints.weight_files import (
    DAMAGED,
    DISAGREE,
    CheckpointError,
    WeightFile,
    explain_errors,
    files_of_keys,
    find_key,
    one_line,
    read_config,
)
from preblock.models.config import FrontEndConfig
from preblock.models.families.family import ALL, Family
from preblock.models.families.published_config import Config
from preblock.models.frontend_data import Array, FrontEndData
from preblock.models.frontend_file import STORED_TYPES
from preblock.models.modules.bias import BiasConfig, T5Config
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.per_layer_config import PerLayerConfig
from preblock.models.steps import Positions, Step, Tokens

SIZES: tuple[tuple[tuple[str, ...], Callable[[FrontEndConfig], set[int]]], ...] = (
    (("n_words",), lambda frontend: {frontend.tokens.rows}),
    (("embedding_size", "input_embedding_size", "word_embed_proj_dim"), lambda frontend: {frontend.tokens.width}),
    (("hidden_size", "n_embd", "d_model", "dim", "emb_dim"), lambda frontend: {frontend.widths[-1]}),
    (("type_vocab_size",), lambda frontend: _indices(frontend, "token_type_ids")),
    (("n_langs",), lambda frontend: _indices(frontend, "langs")),
    (("max_position_embeddings", "n_positions", "max_target_positions"), lambda frontend: _rows(frontend)),
)
"""Keys of a size in config.json -> the values consistent with the tensors; empty if the tensors do not determine it."""

FurtherOutputs = tuple[BiasConfig | None, PerLayerConfig | None, NgramConfig | None]
"""The configs of the outputs beside the vectors."""


def read_frontend(
    folder: Path,
    side: str | None = None,
    arithmetic: Literal["float32", "source"] = "float32",
    segments: bool = False,
    rotary_length: int | None = None,
    count_bytes: ByteCount = lambda *_: None,
    widen: bool = True,
    reference: bool = False,
) -> FrontEndData:
    """Build the front-end of the checkpoint in `folder`, with float32 tensors, reading no other tensor.

    Float32 tensors are mapped from the file, not read. Writing into one changes the memory of this process alone.

    Args:
        folder: holds `config.json` and safetensors files.
        side: "encoder" or "decoder" of an encoder-decoder, "text" of a model with images too; None for all others.
        arithmetic: "source" rounds after every step to the type of the token table in the file, like a library with
            the model loaded in that type; default float32, exact for every type of file.
        segments: require segments in families with segments as rows of the token table, where a library adds them
            only on request; default False, never add them.
        rotary_length: tokens of the whole sequence, for frequencies scaled by it (rope types "dynamic" and
            "longrope"); default None: no rotary outputs for such a model.
        count_bytes: called with the number of bytes of each chunk converted to float32; ignored by default.
        widen: default True; False leaves a large token table mapped and in its stored type, to be read in chunks.
        reference: leave n-gram tables in their files, as `NgramConfig.referenced` states; default False.

    Raises:
        CheckpointError: a file is missing or broken, the family is not known, or its values are not understood.

    """
    name, family, document, template, bias, per_layer, ngrams = _read_config(folder, side, segments)
    values = section_of(document, family.sections)
    if reference and ngrams is None:
        raise CheckpointError(f"--reference: got a {name!r} without n-gram tables, expected a model with them")
    ngrams = replace(ngrams, referenced=reference) if ngrams else None
    further = bias, count_bytes, widen, per_layer, ngrams
    steps, tensors, stored = read_tensors(folder, template, family.prefix, *further)
    with explain_errors(f"{folder}: {DISAGREE}"):
        config = _configure(name, family, values, steps)
        refused = tuple(family.refused(Config(document)))  # after the check of sizes: it may list many ids
        config = replace(config, refused_ids=refused, bias=bias, per_layer=per_layer, ngrams=ngrams)
        config = replace(config, arithmetic=stored) if arithmetic == "source" else config
        _zero(tensors, family.zeroed(Config(values)))
    config = _with_rotary(config, folder, family, values, rotary_length)
    with explain_errors(f"{folder}: {DISAGREE}"):
        return FrontEndData(config, tensors).check()


def find_ngram_tables(folder: Path, side: str | None = None) -> tuple[tuple[TableTensor, ...], ...]:
    """Return the parts of the n-gram table of each layer of the checkpoint in `folder`.

    Raises:
        CheckpointError: as `read_frontend`.

    """
    _, family, *_, ngrams = _read_config(folder, side, segments=False)
    return locate_ngram_tables(folder, files_of_keys(folder), family.prefix, ngrams) if ngrams else ()


def files_needed(folder: Path, side: str | None = None, segments: bool = False) -> list[str]:
    """Return the names of the weight files for `read_frontend`; they need not be there yet.

    Raises:
        CheckpointError: as `read_frontend`.

    """
    _, family, document, template, bias, per_layer, ngrams = _read_config(folder, side, segments)
    rotary = family.rotary_of(section_of(document, family.sections))
    companions = [bias.weight] if isinstance(bias, T5Config) else []
    companions += [rotary.tensors] if rotary else []
    companions += per_layer.weights if per_layer else []
    companions += [keys for parts in ngrams.weights for keys in parts] if ngrams else []
    return files_of_steps(folder, template, family.prefix, companions)


def _read_config(
    folder: Path, side: str | None, segments: bool
) -> tuple[str, Family, Mapping[str, Any], Sequence[Step], *FurtherOutputs]:
    """Return the family's name and row, `config.json`, its steps without sizes, and further inputs."""
    document = read_config(folder)
    name, family = family_of(document, side, segments)
    values = section_of(document, family.sections)
    config = Config(values, segments)
    try:
        bias = family.bias(config) if family.bias else None
        further = bias, family.per_layer(config), family.ngrams(config)
        return name, family, document, family.with_head(family.steps(config), Config(document)), *further
    except (TypeError, ArithmeticError) as error:
        if values.get(config.last) is None:
            raise CheckpointError(f"config.json: {config.last} is missing; {name!r} needs it") from error
        raise CheckpointError(f"config.json: {config.last} is {values[config.last]!r}: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _with_rotary(
    config: FrontEndConfig, folder: Path, family: Family, values: Mapping[str, Any], length: int | None
) -> FrontEndConfig:
    """Return `config` with the rotary outputs of its family, or with the reason for their absence."""
    row = family.rotary_of(values)
    refused = None
    if row is None:
        refused = f"{config.family!r} here has no rotary positions"
    else:
        try:
            outputs = read_rotary(row, values, config.widths[-1], config.max_len or 0, length)
        except MissingLengthError as error:
            return replace(config, no_rotary=one_line(error))
        except DAMAGED as error:
            raise CheckpointError(f"config.json: {one_line(error)}") from error
        if not any(output.config.length for output in outputs):
            refused = f"the angles of {config.family!r} here do not depend on it"
    if refused and length is not None:
        raise CheckpointError(f"--rotary-length: {refused}; leave the option out")
    if row is None:
        return config
    tensor = _read_tensor(folder, family.prefix, row.tensors) if row.tensors else None
    if tensor is not None:
        with explain_errors(f"{folder}: {DISAGREE}"):
            stored = [as_stored(output, tensor) for output in outputs]
        outputs = tuple(output for output in stored if output is not None)
        if len(outputs) < len(stored):
            return replace(config, no_rotary=f"the table {row.tensors[0]} in the file is another than its formula's")
    return replace(config, rotary=outputs)


def _read_tensor(folder: Path, prefix: str, keys: tuple[str, ...]) -> NDArray[np.float32] | None:
    """Return a tensor as float32; None if the files lack it."""
    files = files_of_keys(folder)
    key = find_key(files, prefix, keys)
    if key is None:
        return None
    return WeightFile(files[key]).get(key, (*STORED_TYPES, "float64")).astype(np.float32)


def _configure(name: str, family: Family, values: Mapping[str, Any], steps: tuple[Step, ...]) -> FrontEndConfig:
    config = Config(values)
    frontend = FrontEndConfig(
        family=name,
        steps=steps,
        max_len=limit_of(steps, family.longest_input(config)),
        padding_idx=_padding(config("pad_token_id", family.padding), steps),
        lookup=len(steps) if family.lookup(config) == ALL else family.lookup(config),
        consumer_scales=family.consumer_scales,
        streams=family.streams(config),
        copies=family.copies(config),
    )
    _check_sizes(family, values, frontend)
    return frontend


def _zero(tensors: Mapping[str, Array], token: int | None) -> None:
    """Replace the row of `token` in the token table by zeros, if the library does so. The file stays as it is."""
    if token is None:
        return
    table = tensors["tokens.weight"]
    if type(token) is not int or not -len(table) <= token < len(table):
        raise ValueError(f"pad_token_id is {token!r}, the tensors have {len(table)} rows")
    table[token] = 0


def _padding(stated: Any, steps: tuple[Step, ...]) -> Any:
    """Return the padding id. Files may state -1 or an id beyond the table for none, unless positions need it."""
    rows = steps[0].rows if isinstance(steps[0], Tokens) else 0
    counted = any(isinstance(step, Positions) and step.counts == "ids" for step in steps)
    return stated if counted or (type(stated) is int and 0 <= stated < rows) else None


def limit_of(steps: Sequence[Step], otherwise: Any = None) -> Any:
    """Return the largest max_len allowed by the positions among `steps`; `otherwise` without positions."""
    return next((step.limit for step in steps if isinstance(step, Positions)), otherwise)


def _check_sizes(family: Family, values: Mapping[str, Any], frontend: FrontEndConfig) -> None:
    """Compare the sizes in `config.json` with those of the tensors."""
    vocab = next((key for key in family.vocab if values.get(key) is not None), "")
    further = ((key, sizes_of(frontend)) for keys, sizes_of in SIZES for key in keys)
    for key, allowed in ((vocab, {frontend.tokens.rows}), *further):
        stated = values.get(key)
        if stated is not None and allowed and (type(stated) is not int or stated not in allowed):
            raise ValueError(f"{key} is {stated!r}, the tensors have {' or '.join(map(str, sorted(allowed)))}")


def _indices(frontend: FrontEndConfig, name: str) -> set[int]:
    return {frontend.indices[name]} if name in frontend.indices else set()


def _rows(frontend: FrontEndConfig) -> set[int]:
    """Return both row counts: some families include the rows before the first position, some do not."""
    positions = frontend.positions
    return {positions.rows, positions.rows - positions.first} if positions and positions.table == "learned" else set()
