"""From a source to a proven artifact in a repository, and the proof once more."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import onnx
import torch
from torch import nn

from incipit import __version__
from incipit.export.artifact import check_name, draft, publish
from incipit.export.errors import ExportError
from incipit.export.graph import EMBEDDINGS_GRAPH, describe_graph, export_graph, read_initializers
from incipit.export.parity import prove, prove_lookup, prove_rotary
from incipit.export.source import LoadedSource, load_source
from incipit.models.custom import CustomFrontEnd
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
    Source,
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
    rotary_length: int | None = None,
) -> Exported:
    """Export the front-end that `source` names as the next version of `name` in `repository`.

    `side`, `arithmetic` and `rotary_length` are those of `read_frontend`; `max_len` sets another limit than the
    source's, `resizing` how a learned table is made to fit, as in `resized`. `report` is told each step as it begins.
    An export that fails or is interrupted leaves nothing to be seen.

    Raises:
        ExportError: the source cannot be read, the graph is not equal to its module, or the disk refuses.

    """
    check_name(name)
    report(f"reading {source}")
    loaded = load_source(source, side, arithmetic, rotary_length)
    if isinstance(loaded.frontend, FrontEnd) and loaded.frontend.config.no_rotary:
        report(f"leaving rotary outputs out: {loaded.frontend.config.no_rotary}")
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


def export_module(
    module: nn.Module, name: str, repository: Path, *, vocab_size: int, max_len: int, exact: bool = False
) -> Exported:
    """Export a module of one's own as the next version of `name` in `repository`, and prove its graph equal to it.

    The arguments are those of `CustomFrontEnd`. The artifact does not hold the module, so that `verify` can check its
    hashes, but not prove it again.

    Raises:
        ExportError: the module returns no vectors, the graph is not equal to it, or the disk refuses.

    """
    training = module.training
    module.eval()
    try:
        frontend = CustomFrontEnd(module, vocab_size, max_len, exact)
        return export_loaded(LoadedSource(frontend, Source(kind="module")), name, repository)
    except ValueError as error:
        raise ExportError(str(error)) from error
    finally:
        module.train(training)


def verify(folder: Path, report: Report = lambda _: None) -> ParityReport:
    """Check the hashes of the artifact in `folder`, and prove its graph equal to a PyTorch module once more.

    The module is built from the manifest around the weights that the artifact holds; what else the manifest says must
    follow from it.

    Raises:
        ExportError: a file differs from its hash, or the graph from the module.

    """
    try:
        manifest = read(Manifest, folder / MANIFEST)
        report("checking the hashes")
        check_files(folder, manifest)
        if manifest.front_end is None:
            raise ExportError(f"{folder}: the hashes agree; the module that it came from alone can prove it again")
        try:
            config = FrontEndConfig.from_document(manifest.front_end)
            frontend = FrontEnd.from_tensors(config, read_initializers(folder))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ExportError(f"{folder}: manifest and weights disagree: {' '.join(str(error).split())}") from error
        again = _describe(LoadedSource(frontend, manifest.source, resized=manifest.resized), folder)
        for name in Manifest.model_fields:
            told, true = getattr(manifest, name), getattr(again, name)
            if name != "versions" and told != true:
                raise ExportError(f"{folder / MANIFEST}: {name} is {told!r}, that of the artifact is {true!r}")
        return _prove(frontend, folder, report)
    except IncipitError as error:
        raise ExportError(str(error)) from error


def _resize(loaded: LoadedSource, max_len: int, resizing: str | None) -> LoadedSource:
    assert isinstance(loaded.frontend, FrontEnd)
    try:
        frontend = resized(loaded.frontend, max_len, resizing)
    except ValueError as error:
        raise ExportError(f"--max-len and --resize: {error}") from error
    record = Resized(from_max_len=loaded.frontend.signature.max_len, method=resizing)
    return replace(loaded, frontend=frontend, resized=record)


def _prove(frontend: FrontEnd | CustomFrontEnd, folder: Path, report: Report) -> ParityReport:
    parity = prove(frontend, Session(folder, CPU), lambda done, of: report(f"proving it equal: {done} of {of} cases"))
    if isinstance(frontend, FrontEnd) and frontend.signature.lookup_width is not None:
        prove_lookup(frontend, Session(folder, CPU, graph=TOKEN_GRAPH))
    if isinstance(frontend, FrontEnd) and frontend.signature.rotary:
        report("proving the rotary outputs equal")
        prove_rotary(frontend, Session(folder, CPU), Session(folder, CPU, graph=EMBEDDINGS_GRAPH))
    return parity


def _describe(loaded: LoadedSource, folder: Path) -> Manifest:
    frontend, signature = loaded.frontend, loaded.frontend.signature
    inputs, outputs = describe_graph(folder / GRAPH)
    files = [name for name in (GRAPH, EMBEDDINGS_GRAPH, TOKEN_GRAPH, DATA, TOKENIZER) if (folder / name).is_file()]
    return Manifest(
        family=signature.family,
        vocab_size=signature.vocab_size,
        width=signature.width,
        max_len=signature.max_len,
        segments=signature.segments,
        counts=signature.counts,
        padding_id=signature.padding_idx,
        refused_ids=signature.refused_ids,
        dtype="float32",
        inputs=inputs,
        outputs=outputs,
        token_embeddings=TokenEmbeddings(
            graph=GRAPH if signature.lookup_width is None else TOKEN_GRAPH,
            width=signature.lookup_width or signature.width,
            consumer_scales=signature.consumer_scales,
        )
        if isinstance(frontend, FrontEnd)
        else None,
        resized=loaded.resized,
        front_end=frontend.config.to_document() if isinstance(frontend, FrontEnd) else None,
        files={name: describe(folder / name) for name in files},
        source=loaded.record,
        versions={"incipit": __version__, "onnx": onnx.__version__, "torch": torch.__version__},
    )
