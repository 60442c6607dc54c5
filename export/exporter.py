"""From a source to a proven artifact in a repository, and the proof once more."""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch

from incipit import __version__
from incipit.export.artifact import check_name, draft, publish
from incipit.export.errors import ExportError
from incipit.export.graph import describe_graph, export_graph, read_initializers
from incipit.export.parity import prove
from incipit.export.source import LoadedSource, load_source
from incipit.models.frontend import FrontEnd, FrontEndConfig
from incipit.service.errors import IncipitError
from incipit.service.manifest import (
    DATA,
    GRAPH,
    MANIFEST,
    PARITY,
    TOKENIZER,
    Manifest,
    ParityReport,
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


def export(source: str, name: str, repository: Path, report: Report = lambda _: None) -> Exported:
    """Export the front-end that `source` names as the next version of `name` in `repository`.

    `report` is told each step as it begins. An export that fails or is interrupted leaves nothing to be seen.

    Raises:
        ExportError: the source cannot be read, the graph is not equal to its module, or the disk refuses.

    """
    check_name(name)
    report(f"reading {source}")
    return export_loaded(load_source(source), name, repository, report)


def export_loaded(loaded: LoadedSource, name: str, repository: Path, report: Report = lambda _: None) -> Exported:
    """Export a front-end that is in memory already; otherwise as `export`."""
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
        config = FrontEndConfig(**manifest.front_end)  # type: ignore[arg-type]  # as this file wrote it
        weights = read_initializers(folder)
        frontend = FrontEnd.from_tensors(config, weights)
        return _prove(frontend, folder, report)
    except IncipitError as error:
        raise ExportError(str(error)) from error


def _prove(frontend: FrontEnd, folder: Path, report: Report) -> ParityReport:
    session = Session(folder, CPU)
    return prove(frontend, session, lambda done, of: report(f"proving it equal: {done} of {of} cases"))


def _describe(loaded: LoadedSource, folder: Path) -> Manifest:
    config = loaded.frontend.config
    inputs, outputs = describe_graph(folder / GRAPH)
    files = [name for name in (GRAPH, DATA, TOKENIZER) if (folder / name).is_file()]
    return Manifest(
        family=config.family,
        vocab_size=config.vocab_size,
        width=config.d_model,
        max_len=config.max_len,
        segments=config.segments,
        dtype="float32",
        inputs=inputs,
        outputs=outputs,
        front_end=dataclasses.asdict(config),
        files={name: describe(folder / name) for name in files},
        source=loaded.record,
        versions={"incipit": __version__, "onnx": onnx.__version__, "torch": torch.__version__},
    )
