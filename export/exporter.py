"""From a source to a proven artifact in a repository, and the proof once more."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import onnx
import torch

from incipit import __version__
from incipit.export.artifact import check_name, draft, publish
from incipit.export.errors import ExportError
from incipit.export.graph import describe_graph, export_graph, read_initializers
from incipit.export.parity import prove
from incipit.export.source import LoadedSource, load_source
from incipit.models.frontend import FrontEnd, FrontEndConfig
from incipit.models.resizing import resized
from incipit.service.errors import IncipitError
from incipit.service.manifest import (
    DATA,
    GRAPH,
    MANIFEST,
    PARITY,
    TOKEN_GRAPH,
    TOKENIZER,
    Manifest,
    ParityReport,
    Resized,
    TokenEmbeddings,
    check_files,
    describe,
    read,
    write,
)
from incipit.service.runtime import CPU, Session

Report = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """An artifact that was published."""

    folder: Path
    manifest: Manifest
    parity: ParityReport


def export(
    source: str,
    name: str,
    repository: Path,
    report: Report = lambda _: None,
    side: str | None = None,
    arithmetic: Literal["float32", "source"] = "float32",
    max_len: int | None = None,
    resizing: str | None = None,
) -> Exported:
    """Export the front-end that `source` names as the next version of `name` in `repository`.

    `side` and `arithmetic` are those of `read_frontend`; `max_len` sets another limit than the source's, `resizing` how
    a learned table is made to fit, as in `resized`. `report` is told each step as it begins. An export that fails or is
    interrupted leaves nothing to be seen.

    Raises:
        ExportError: the source cannot be read, the graph is not equal to its module, or the disk refuses.

    """
    check_name(name)
    report(f"reading {source}")
    loaded = load_source(source, side, arithmetic)
    if max_len is not None:
        loaded = _resize(loaded, max_len, resizing)
    elif resizing is not None:
        raise ExportError(f"--resize: got {resizing!r}, allowed only with --max-len")
    return export_loaded(loaded, name, repository, report)


def export_loaded(loaded: LoadedSource, name: str, repository: Path, report: Report = lambda _: None) -> Exported:
    """Export a front-end that is in memory already; otherwise as `export`. It stays in the mode that it was in."""
    training = loaded.frontend.training
    loaded.frontend.eval()
    try:
        with draft(repository, name) as folder:
            report("writing the graph")
            export_graph(loaded.frontend, folder)
            if loaded.tokenizer:
                shutil.copyfile(loaded.tokenizer, folder / TOKENIZER)
            manifest = _describe(loaded, folder)
            write(manifest, folder / MANIFEST)
            parity = _prove(loaded.frontend, folder, report)
            write(parity, folder / PARITY)
            version = publish(folder)
            return Exported(repository / name / str(version), manifest, parity)
    except OSError as error:
        raise ExportError(f"{error.filename or repository}: {error.strerror}") from error
    except IncipitError as error:
        raise ExportError(str(error)) from error
    finally:
        loaded.frontend.train(training)


def verify(folder: Path, report: Report = lambda _: None) -> ParityReport:
    """Check the hashes of the artifact in `folder`, and prove its graph equal to a PyTorch module once more.

    The module is built from the manifest around the weights that the artifact holds.

    Raises:
        ExportError: a file differs from its hash, or the graph from the module.

    """
    try:
        manifest = read(Manifest, folder / MANIFEST)
        report("checking the hashes")
        check_files(folder, manifest)
        try:
            config = FrontEndConfig.from_document(manifest.front_end)
            frontend = FrontEnd.from_tensors(config, read_initializers(folder))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ExportError(f"{folder}: manifest and weights disagree: {' '.join(str(error).split())}") from error
        return _prove(frontend, folder, report)
    except IncipitError as error:
        raise ExportError(str(error)) from error


def _resize(loaded: LoadedSource, max_len: int, resizing: str | None) -> LoadedSource:
    try:
        frontend = resized(loaded.frontend, max_len, resizing)
    except ValueError as error:
        raise ExportError(f"--max-len and --resize: {error}") from error
    record = Resized(from_max_len=loaded.frontend.config.max_len, method=resizing)
    return replace(loaded, frontend=frontend, resized=record)


def _prove(frontend: FrontEnd, folder: Path, report: Report) -> ParityReport:
    session = Session(folder, CPU)
    return prove(frontend, session, lambda done, of: report(f"proving it equal: {done} of {of} cases"))


def _describe(loaded: LoadedSource, folder: Path) -> Manifest:
    config = loaded.frontend.config
    inputs, outputs = describe_graph(folder / GRAPH)
    files = [name for name in (GRAPH, TOKEN_GRAPH, DATA, TOKENIZER) if (folder / name).is_file()]
    return Manifest(
        family=config.family,
        vocab_size=config.tokens.rows,
        width=config.widths[-1],
        max_len=config.max_len,
        segments=config.segments,
        counts=config.counts,
        padding_id=config.padding_idx,
        refused_ids=config.refused_ids,
        dtype="float32",
        inputs=inputs,
        outputs=outputs,
        token_embeddings=TokenEmbeddings(
            graph=TOKEN_GRAPH if (folder / TOKEN_GRAPH).is_file() else GRAPH,
            width=config.widths[config.lookup - 1],
            consumer_scales=config.consumer_scales,
        ),
        resized=loaded.resized,
        front_end=config.to_document(),
        files={name: describe(folder / name) for name in files},
        source=loaded.record,
        versions={"incipit": __version__, "onnx": onnx.__version__, "torch": torch.__version__},
    )
