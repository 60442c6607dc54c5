"""Discovers the front-end of a checkpoint whose model type has no row in the family table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preblock.export.discovery.errors import DiscoveryError, MissingTensorError
from preblock.export.discovery.library import check_document, library_version, model_classes, quiet, read_config
from preblock.export.discovery.model import BlocklessModel
from preblock.export.discovery.proof import Proof, refuse
from preblock.export.discovery.refusals import explain
from preblock.export.discovery.search import FoundSteps, Search
from preblock.models.checkpoints.divided_tensors import describe_parts
from preblock.models.checkpoints.family_lookup import row_name
from preblock.models.checkpoints.other_names import describe_other_name
from preblock.models.checkpoints.reader import limit_of
from preblock.models.checkpoints.step_tensors import ByteCount, files_of_steps, read_tensors
from preblock.models.checkpoints.weight_files import WeightFile, explain_errors, files_of_keys, is_sharded
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_data import FrontEndData
from preblock.models.frontend_file import WEIGHTS
from preblock.models.steps import Positions, names_of, parameters
from preblock.models.torch_arrays import tensor_of
from preblock.service.artifacts.parity import OutputParity
from preblock.service.artifacts.safetensors_header import TYPES

NO_ROTARY = "discovery finds the vectors that enter block 0, not the cosines and sines of attention"
READ_TYPES = tuple(dtype.name for name, dtype in TYPES.items() if not name.startswith("F8"))
"""Allowed types of tensors that the model needs beside the front-end."""


@dataclass(frozen=True)
class Discovery:
    """A discovered front-end.

    Args:
        frontend: the front-end, with float32 tensors.
        parity: its comparison with the library's model.
        library: name and version of the library.
        beside: arguments of the model beside `inputs_embeds`, and the output or input of the artifact for each.

    """

    frontend: FrontEnd
    parity: OutputParity
    library: str
    beside: dict[str, str]


def discover(
    folder: Path,
    document: Mapping[str, Any],
    side: str | None = None,
    count_bytes: ByteCount = lambda *_: None,
    widen: bool = True,
    tokens_only: bool = False,
) -> Discovery:
    """Find the front-end of the checkpoint in `folder`, and prove it equal to the library's model.

    Args:
        folder: holds safetensors files.
        document: content of its `config.json`.
        side: as in `BlocklessModel`.
        count_bytes: receives the bytes of each chunk converted to float32.
        widen: as in `read_frontend`.
        tokens_only: find the model's token table alone.

    Raises:
        CheckpointError: the front-end is not found, or a file is damaged.

    """
    check_document(document)
    with quiet():
        model, found = _search(folder, document, side, tokens_only)
        name = row_name(document, side) + ("/tokens" if tokens_only else "")
        frontend = _read(folder, name, found, count_bytes)
        for own in found.others:
            model.load(own, _read_tensor(folder, model.keys[own]))
        _load(model, found, frontend)
        refused = [] if tokens_only else Proof(model, frontend).refused_ids()
        frontend = refuse(frontend, refused) if refused else frontend
        proof = Proof(model, frontend)
        parity = proof.run_tokens() if tokens_only else proof.run()
        if not widen:
            altering = model if model.altered else None
            del frontend, proof, model  # the proof needed the widened table, the export does not
            frontend = _read(folder, name, found, count_bytes, widen=False)
            if altering is not None:
                _load(altering, found, frontend)
            frontend = refuse(frontend, refused) if refused else frontend
    return Discovery(frontend, parity, library_version(), {"input_ids": "input_ids"} if found.takes_ids else {})


def files_discovered(
    folder: Path, document: Mapping[str, Any], side: str | None = None, tokens_only: bool = False
) -> list[str]:
    """Return the names of the weight files with the tensors of the front-end; they need not be there yet.

    Raises:
        CheckpointError: as `discover`.

    """
    check_document(document)
    read_config(folder, str(document["model_type"]))
    if not is_sharded(folder):
        return [WEIGHTS]
    with quiet():
        found = _search(folder, document, side, tokens_only)[1]
    return files_of_steps(folder, found.steps, known=found.known)


def _search(
    folder: Path, document: Mapping[str, Any], side: str | None, tokens_only: bool
) -> tuple[BlocklessModel, FoundSteps]:
    """Return a model without blocks, and its steps; an error is the one of the checkpoint's own class."""
    config, keys = read_config(folder, str(document["model_type"])), files_of_keys(folder)
    errors: list[DiscoveryError] = []
    for kind in model_classes(config):
        try:
            model = BlocklessModel(kind, config, side, keys)
            return model, _find(folder, model, tokens_only)
        except DiscoveryError as error:
            errors.append(error)
    raise explain(row_name(document, side), errors[0])


def _find(folder: Path, model: BlocklessModel, tokens_only: bool) -> FoundSteps:
    """Return the steps of `model`; raise DiscoveryError if the values of a tensor are divided among several."""
    search = Search(model)
    try:
        steps = search.find_tokens() if tokens_only else search.find()
    except MissingTensorError as error:
        _refuse_parts(folder, model, model.missing()[:3])
        if found := describe_other_name(model.unmatched(), model.missing()[:1]):
            raise DiscoveryError(f"{error}; {found}") from error
        raise
    _refuse_parts(folder, model, [*steps.tensors.values(), *steps.others])
    return steps


def _refuse_parts(folder: Path, model: BlocklessModel, names: Iterable[str]) -> None:
    """Raise DiscoveryError if the checkpoint holds further tensors of the parameters or buffers `names`."""
    for name in names:
        if parts := model.parts(name):
            raise DiscoveryError(f"{folder}: {describe_parts(folder, name, parts)}")


def _read(folder: Path, name: str, found: FoundSteps, count_bytes: ByteCount, widen: bool = True) -> FrontEnd:
    """Return the front-end with the tensors of the checkpoint."""
    computed = found.derived
    # Any computed table serves while the tensors are read: it needs none.
    steps = tuple(
        replace(step, table="exact") if computed is not None and isinstance(step, Positions) else step
        for step in found.steps
    )
    sized, tensors, _ = read_tensors(folder, steps, count_bytes=count_bytes, widen=widen, known=found.known)
    if computed is not None:
        sized = tuple(
            replace(step, table="learned", rows=len(computed)) if isinstance(step, Positions) else step
            for step in sized
        )
        tensors["positions.weight"] = computed.detach().numpy()
    with explain_errors(f"{folder}: the steps found do not fit the tensors"):
        config = FrontEndConfig(
            family=name,
            steps=sized,
            max_len=limit_of(sized, found.max_len),
            padding_idx=found.padding,
            lookup=found.lookup,
            consumer_scales=found.consumer_scales,
            copies=found.copies,
            no_rotary=NO_ROTARY if found.rotary else None,
        )
        return FrontEnd.from_data(FrontEndData(config, tensors).check()).eval()


def _load(model: BlocklessModel, found: FoundSteps, frontend: FrontEnd) -> None:
    """Let `model` hold the tensors of `frontend`, both with the changes of the library's loader."""
    for step_name, step in zip(names_of(found.steps), found.steps, strict=True):
        for parameter, (keys, _) in parameters(step).items():
            if keys:
                own, tensor = found.tensors[keys[0]], frontend.get_parameter(f"{step_name}.{parameter}")
                if own in model.altered:
                    tensor.data = tensor.data.clone()
                model.load(own, tensor.data)
    if model.altered:
        model.alter()


def _read_tensor(folder: Path, key: str) -> Tensor:
    tensor = tensor_of(WeightFile(files_of_keys(folder)[key]).get(key, READ_TYPES))
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
