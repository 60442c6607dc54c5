"""The models that are served: every version folder `<repository>/<name>/<version>/`, opened."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from incipit.service.errors import ArtifactError, Invalid, NotFound
from incipit.service.manifest import (
    GRAPH,
    MANIFEST,
    NAME,
    PARITY,
    TOKENIZER,
    Manifest,
    ParityReport,
    StemManifest,
    Tensor,
    read,
    read_manifest,
)
from incipit.service.runtime import Float32, Session
from incipit.service.tokenizer import Tokenizer

VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, kw_only=True)
class Served:
    """One version of a model, ready to run.

    Args:
        name: of the model.
        version: of the model.
        parity: how it compares with its source.
        sessions: by graph.
        created: when the artifact was written, in seconds since 1970.

    """

    name: str
    version: int
    parity: ParityReport
    sessions: dict[str, Session]
    created: int

    @property
    def provider(self) -> str:
        """The onnxruntime provider that really runs."""
        return self.sessions[GRAPH].provider


@dataclass(frozen=True, kw_only=True)
class Stem(Served):
    """A model whose input is no token ids."""

    manifest: StemManifest


@dataclass(frozen=True, kw_only=True)
class Model(Served):
    """A model of token ids, and the tokenizer of its artifact, if there is one."""

    manifest: Manifest
    tokenizer: Tokenizer | None

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: tuple[str, ...]) -> dict[str, Float32]:
        """Return outputs of tokens by name, each (B, L, width), or (1, L, width) where all rows have the same.

        `feeds` hold every input of the model, and were validated.
        """
        found: dict[str, Float32] = {}
        for graph, names in self.manifest.graphs_for(outputs).items():
            found |= self.sessions[graph].run(feeds, names)
        return found


class Repository:
    """The models of a folder.

    Args:
        root: the folder.
        provider: onnxruntime name of the provider that sessions run on.
        threads: of one session call.

    Raises:
        ArtifactError: an artifact is broken, or there is none at all.

    """

    def __init__(self, root: Path, provider: str, threads: int) -> None:
        self._models: dict[str, dict[int, Model | Stem]] = {}
        for name, version, folder in find_artifacts(root):
            try:
                model = _open(name, version, folder, provider, threads)
            except ArtifactError as error:
                raise ArtifactError(f"{name}/{version}/{error.field}", error.got, error.allowed) from error
            self._models.setdefault(name, {})[version] = model

    def get(self, name: str, version: str | None = None) -> Model:
        """Return a model of token ids: the version named, or its highest.

        Raises:
            NotFound: no such model or version.
            Invalid: it takes something else.

        """
        found = self.find(name, version)
        if isinstance(found, Stem):
            allowed = f"one of token ids; this takes {found.manifest.input.name}, by the Open Inference Protocol"
            raise Invalid("model", name, allowed)
        return found

    def find(self, name: str, version: str | None = None) -> Model | Stem:
        """Return a model, whatever it takes: the version named, or its highest.

        Raises:
            NotFound: no such model or version.

        """
        versions = self._models.get(name)
        if versions is None:
            raise NotFound("model", name, ", ".join(self._models))
        if not version:
            return versions[max(versions)]
        if not VERSION.fullmatch(version) or int(version) not in versions:
            raise NotFound("version", version, ", ".join(map(str, sorted(versions))))
        return versions[int(version)]

    def versions(self, name: str) -> list[int]:
        """Return the versions of the model `name`, ascending."""
        return sorted(self._models[name])

    def newest(self) -> list[Model | Stem]:
        """Return the highest version of each model, by name."""
        return [versions[max(versions)] for _, versions in sorted(self._models.items())]

    def all(self) -> list[Model | Stem]:
        """Return every version of every model, by name and version."""
        return [model for _, versions in sorted(self._models.items()) for _, model in sorted(versions.items())]


def find_artifacts(root: Path) -> list[tuple[str, int, Path]]:
    """Return name, version and folder of every artifact in `root`, by name and version.

    Raises:
        ArtifactError: there is no such folder, or none in it.

    """
    if not root.is_dir():
        raise ArtifactError("repository", str(root), "an existing folder; `incipit export` makes one")
    found = [
        (folder.parent.name, int(folder.name), folder)
        for folder in root.glob("[!.]*/[1-9]*")
        if VERSION.fullmatch(folder.name) and folder.is_dir()
    ]
    for name, _, _ in found:
        if not re.fullmatch(NAME, name):
            raise ArtifactError("model", name, "a name of letters, digits, '.', '_' and '-'")
    if not found:
        raise ArtifactError("repository", f"{root}, without a model", "at least one; `incipit export` adds one")
    return sorted(found)


def _open(name: str, version: int, folder: Path, provider: str, threads: int) -> Model | Stem:
    manifest, parity = read_manifest(folder), read(ParityReport, folder / PARITY)
    if GRAPH not in manifest.graphs:
        raise ArtifactError(f"{MANIFEST} graphs", ", ".join(manifest.graphs), f"at least {GRAPH}")
    sessions = {graph: Session(folder, provider, threads, graph) for graph in manifest.graphs}
    for graph, declared in manifest.graphs.items():
        _compare(graph, "inputs", declared.inputs, sessions[graph].inputs)
        _compare(graph, "outputs", declared.outputs, sessions[graph].outputs)
    opened: dict[str, Any] = {
        "name": name,
        "version": version,
        "parity": parity,
        "sessions": sessions,
        "created": int((folder / MANIFEST).stat().st_mtime),
    }
    if isinstance(manifest, StemManifest):
        return Stem(manifest=manifest, **opened)
    tokenizer = Tokenizer(folder / TOKENIZER) if TOKENIZER in manifest.files else None
    return Model(manifest=manifest, tokenizer=tokenizer, **opened)


def _compare(graph: str, side: str, declared: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    if declared != found:
        told, true = (
            ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in tensors) for tensors in (declared, found)
        )
        raise ArtifactError(f"{MANIFEST} graphs.{graph}.{side}", told, f"those of the graph: {true}")
