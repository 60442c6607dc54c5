"""The models that are served: every version folder `<repository>/<name>/<version>/`, opened."""

import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.checksums import Checksums
from preblock.service.artifacts.manifest import (
    DATA,
    EMBEDDINGS,
    GRAPH,
    MANIFEST,
    NAME,
    PARITY,
    POSITION_EMBEDDINGS,
    POSITIONED_GRAPH,
    SUMMAND,
    TILES_GRAPH,
    TOKEN_EMBEDDINGS,
    TOKEN_GRAPHS,
    TOKENIZER,
    Manifest,
    ParityReport,
    StemManifest,
    Tensor,
    check_files,
    read,
    read_with_identity,
)
from preblock.service.artifacts.onnx_check import check_graphs
from preblock.service.core.auth import EVERYBODY, Authenticator
from preblock.service.core.errors import ArtifactError, Invalid, NotFound
from preblock.service.core.files import FileSignature, stamp_of
from preblock.service.core.types import Int64
from preblock.service.runtime.bound_calls import ReadyCalls
from preblock.service.runtime.chunks import pieces, tile
from preblock.service.runtime.fused_embedding import TokenTable, map_tokens
from preblock.service.runtime.load_progress import Progress
from preblock.service.runtime.position_table import map_positions, place
from preblock.service.runtime.prefetch import ahead
from preblock.service.runtime.session import CPU, Choice, Float32, Session
from preblock.service.runtime.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)
Fingerprint = tuple[tuple[str, FileSignature], ...]
VERSION = re.compile(r"[1-9][0-9]{0,8}")
UNLOADED = "unloaded"
"""Why a version is not served that somebody has unloaded."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """One version of a model, ready to run.

    Args:
        name: of the model.
        version: of the model.
        identity: of the artifact.
        parity: how it compares with its source.
        sessions: by graph.
        created: when the artifact was written, in seconds since 1970.

    """

    name: str
    version: int
    identity: str
    parity: ParityReport
    sessions: dict[str, Session]
    created: int
    kept: dict[Any, Any] = dataclass_field(default_factory=dict, init=False, repr=False)
    """What protocols remember of it, for as long as it is served."""

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
    positions: Float32 | None = dataclass_field(repr=False, compare=False)
    """Vectors of all positions (1, max_len, P), for the graph that is given them; None where none is."""
    tokens: TokenTable | None = dataclass_field(repr=False, compare=False)
    """The rows that this graph adds positions to, where it does nothing else."""
    _chosen: dict[tuple[str, ...], list[tuple[str, list[str]]]] = dataclass_field(
        default_factory=dict, init=False, repr=False
    )

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: tuple[str, ...]) -> dict[str, Float32]:
        """Return outputs of tokens by name, each (B, L, width), or (1, L, width) where all rows have the same.

        `feeds` hold every input of the model, and were validated.
        """
        graphs = self._chosen.get(outputs) or self._choose(outputs)
        size = feeds["input_ids"].size
        large = size >= self._tiled_from
        if len(graphs) == 1 and not large:  # at once: a call of one token takes five microseconds
            graph, names = graphs[0]
            if self._ready is not None and self.positions is not None and outputs == (EMBEDDINGS,):
                if (vectors := self._ready.run(feeds)) is not None:
                    return {EMBEDDINGS: vectors}
                if len(feeds["offset"]) == 1:
                    graph, feeds = POSITIONED_GRAPH, place(feeds, self.positions)
            if size == 1 and len(names) == 1:
                return {names[0]: self.sessions[graph].run_single(feeds, names[0])}
            return self.sessions[graph].run(feeds, names)
        found: dict[str, Float32] = {}
        for graph, names in graphs:
            tiles = tile(feeds, self.manifest) if large and names == [EMBEDDINGS] else None
            found |= self.sessions[graph].run(feeds, names) if tiles is None else self._run_tiles(feeds, tiles)
        return found

    def run_in_pieces(self, feeds: Mapping[str, Int64], output: str, most: int) -> Iterator[Float32]:
        """Yield one output of tokens, a piece of at most `most` of them after another; a GPU computes them ahead."""
        # All of them cut at once: between two of them nothing is left of that in the caches of the processor.
        cut = list(pieces(feeds, most))
        run = partial(self._run_piece, output)
        return ahead(run, cut) if self.sessions[GRAPH].bound else map(run, cut)

    def _run_piece(self, output: str, feeds: Mapping[str, Int64]) -> Float32:
        return self.run(feeds, (output,))[output]

    def _choose(self, outputs: tuple[str, ...]) -> list[tuple[str, list[str]]]:
        """Remember, and return, which graph gives which of `outputs`."""
        self._chosen[outputs] = graphs = list(self.manifest.graphs_for(outputs).items())
        return graphs

    @cached_property
    def _ready(self) -> ReadyCalls | None:
        """Calls that are kept ready."""
        return (
            None if self.positions is None else ReadyCalls(self.sessions[POSITIONED_GRAPH], self.positions, self.tokens)
        )

    @cached_property
    def _tiled_from(self) -> float:
        """Tokens of the smallest call that may run in tiles."""
        return self.manifest.tiles.least if self.manifest.tiles and TILES_GRAPH in self.sessions else math.inf

    def _run_tiles(self, feeds: Mapping[str, NDArray[Any]], tiles: Mapping[str, NDArray[Any]]) -> dict[str, Float32]:
        """Return `embeddings` for `feeds`, from the graph of tiles and its own feeds."""
        vectors = self.sessions[TILES_GRAPH].run(tiles)[EMBEDDINGS]
        batch, length = feeds["input_ids"].shape
        return {EMBEDDINGS: vectors.reshape(-1, vectors.shape[-1])[: batch * length].reshape(batch, length, -1)}


@dataclass(frozen=True)
class State:
    """What has become of a version folder: "READY" to answer, "LOADING", or "UNAVAILABLE" for a reason."""

    name: str
    version: int
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = ""


class Repository:
    """The models of a folder, which can follow it as it changes.

    Args:
        root: the folder.
        provider: onnxruntime name of the provider that sessions run on.
        threads: of one session call.
        cache: folder in which files that were checked are remembered; default None: each is read and checked.
        access: says which models a caller may use; every model that a protocol asks for is found here. Default: all.
        choice: how the provider was chosen; default: by name.
        progress: is told how far the opening is; default: nobody is.
        gpu_mem_limit_bytes: most memory of a GPU that one graph takes; default None: all that there is.

    Raises:
        ArtifactError: an artifact is broken or was tampered with, or there is none at all.

    """

    def __init__(
        self,
        root: Path,
        provider: str,
        threads: int,
        cache: Path | None = None,
        access: Authenticator = EVERYBODY,
        choice: Choice | None = None,
        progress: Progress | None = None,
        gpu_mem_limit_bytes: int | None = None,
    ) -> None:
        self.root = root
        self.choice = choice or Choice(provider, provider, None, None)
        self.access = access
        self._opener = partial(_open, provider=provider, threads=threads, gpu_mem_limit_bytes=gpu_mem_limit_bytes)
        self._cache = cache
        self._progress = progress or Progress()
        # Whoever finds a model keeps it until it has answered: these are replaced as a whole, never changed.
        self._models: dict[str, dict[int, Model | Stem]] = {}
        self._states: dict[tuple[str, int], State] = {}
        self._seen: dict[tuple[str, int], Fingerprint] = {}
        self._opened: dict[tuple[str, int], Fingerprint] = {}
        self._one_at_a_time = Lock()
        for state in self.refresh():
            if state.state == "UNAVAILABLE":
                raise self._broken[state.name, state.version]

    def refresh(self, unloaded: Collection[str] = ()) -> list[State]:
        """Open what is new or has changed in the folder, let go of what is gone or `unloaded`, and return the changes.

        A version that cannot be opened leaves the others as they were, and, where it was ready before, itself, unless
        its data file was changed in place: then what is mapped is no longer what was checked. One that
        is gone still answers the requests that have found it; its memory is returned after the last. This may take
        long, and may run beside requests.

        Raises:
            ArtifactError: the folder cannot be read or has no model; nothing changes.

        """
        with self._one_at_a_time:
            models: dict[str, dict[int, Model | Stem]] = {}
            states: dict[tuple[str, int], State] = {}
            self._broken: dict[tuple[str, int], ArtifactError] = {}
            checksums = Checksums(self._cache)
            try:
                found = find_artifacts(self.root)
                self._progress.of = len(found)
                for self._progress.ready, (name, version, folder) in enumerate(found):
                    self._progress.model = name
                    if name in unloaded:
                        states[name, version] = State(name, version, "UNAVAILABLE", UNLOADED)
                        self._seen.pop((name, version), None)
                        continue
                    model, states[name, version] = self._follow(name, version, folder, checksums)
                    if model is not None:
                        models.setdefault(name, {})[version] = model
                self._progress.ready, self._progress.model = len(found), None
            finally:
                checksums.save()
            before, self._models, self._states = self._states, models, states
            gone = [State(*key, "UNAVAILABLE", "gone") for key in before if key not in states]
            self._seen = {key: seen for key, seen in self._seen.items() if key in states}
            self._opened = {key: seen for key, seen in self._opened.items() if key in states}
            return [*gone, *(state for key, state in states.items() if before.get(key) != state)]

    def _follow(self, name: str, version: int, folder: Path, checksums: Checksums) -> tuple[Model | Stem | None, State]:
        """Return what a folder holds: as it was, if nothing in it has changed."""
        key, seen = (name, version), _fingerprint(folder)
        model, state = self._models.get(name, {}).get(version), self._states.get((name, version))
        if state is not None and self._seen.get(key) == seen:
            return model, state
        self._seen[key] = seen
        self._states = self._states | {key: State(name, version, "LOADING")}
        try:
            opened = self._opener(name, version, folder, checksums)
        except OSError:  # such as too many open files: it is opened again at the next look
            del self._seen[key]
            raise
        except Exception as error:  # onnxruntime's own share no narrower parent
            if not isinstance(error, ArtifactError):
                LOG.exception("%s/%d cannot be opened", name, version)
                error = ArtifactError(MANIFEST, "an artifact that fails; the log says how", "one that can be run")
            self._broken[key] = ArtifactError(f"{name}/{version}/{error.field}", error.got, error.allowed)
            if _changed_in_place(self._opened.get(key, ()), seen):
                model = None
            return model, State(name, version, "UNAVAILABLE" if model is None else "READY", str(self._broken[key]))
        self._opened[key] = seen
        return opened, State(name, version, "READY")

    def index(self) -> list[State]:
        """Return the state of every version folder that the caller may use, by name and version."""
        return [state for _, state in sorted(self._states.items()) if self.access.shows(state.name)]

    def get(self, name: str, version: str | None = None) -> Model:
        """Return a model of token ids: the version named, or its highest.

        Raises:
            Forbidden: the caller may not use it.
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
            Forbidden: the caller may not use it.
            NotFound: no such model or version.

        """
        self.access.check_model(name)
        versions = self._models.get(name)
        if versions is None:
            raise NotFound("model", name, ", ".join(filter(self.access.shows, self._models)))
        if not version:
            return versions[max(versions)]
        if not VERSION.fullmatch(version) or int(version) not in versions:
            raise NotFound("version", version, ", ".join(map(str, sorted(versions))))
        return versions[int(version)]

    def select(self, name: str | None, version: str | None) -> list[Model | Stem]:
        """Return the version named of a model, all its versions where none is, or all models where no name is given.

        Raises:
            Forbidden: the caller may not use it.
            NotFound: no such model or version.

        """
        if not name and not version:
            return self.all()
        found = self.find(name or "", version)
        return [found] if version else [model for model in self.all() if model.name == name]

    def versions(self, name: str) -> list[int]:
        """Return the versions of the model `name`, ascending; none where it is being unloaded."""
        return sorted(self._models.get(name, ()))

    def newest(self) -> list[Model | Stem]:
        """Return the highest version of each model that the caller may use, by name."""
        models = sorted(self._models.items())
        return [versions[max(versions)] for name, versions in models if self.access.shows(name)]

    def all(self) -> list[Model | Stem]:
        """Return every version of every model that the caller may use, by name and version."""
        models = [versions for name, versions in sorted(self._models.items()) if self.access.shows(name)]
        return [model for versions in models for _, model in sorted(versions.items())]


def _fingerprint(folder: Path) -> Fingerprint:
    """Return what the file system tells of the files of an artifact; it changes when one of them does."""
    try:
        return tuple(sorted((file.name, stamp_of(file.lstat())) for file in folder.iterdir()))
    except OSError:
        return ()


def _changed_in_place(before: Fingerprint, now: Fingerprint) -> bool:
    """Return whether the data file, which is mapped, is the same as before, but of another size or time of change."""
    # Of a file that is not mapped, another may have got the inode.
    then, found = (dict(files).get(DATA) for files in (before, now))
    return then is not None and found is not None and then[:2] == found[:2] and then[2:4] != found[2:4]


def find_artifacts(root: Path) -> list[tuple[str, int, Path]]:
    """Return name, version and folder of every artifact in `root`, by name and version.

    Raises:
        ArtifactError: there is no such folder, or none in it.

    """
    if not root.is_dir():
        raise ArtifactError("repository", str(root), "an existing folder; `preblock export` makes one")
    found = [
        (folder.parent.name, int(folder.name), folder)
        for folder in root.glob("[!.]*/[1-9]*")
        if VERSION.fullmatch(folder.name) and folder.is_dir()
    ]
    for name, _, _ in found:
        if not re.fullmatch(NAME, name):
            raise ArtifactError("model", name, "a name of letters, digits, '.', '_' and '-'")
    if not found:
        raise ArtifactError("repository", f"{root}, without a model", "at least one; `preblock export` adds one")
    return sorted(found)


def _open(
    name: str,
    version: int,
    folder: Path,
    checksums: Checksums,
    provider: str,
    threads: int,
    gpu_mem_limit_bytes: int | None,
) -> Model | Stem:
    """Check the artifact in `folder`, open its graphs, and run each once."""
    manifest, identity = read_with_identity(folder)
    parity = read(ParityReport, folder / PARITY)
    if GRAPH not in manifest.graphs:
        raise ArtifactError(f"{MANIFEST} graphs", ", ".join(manifest.graphs), f"at least {GRAPH}")
    stamps = check_files(folder, manifest, checksums.sha256)
    check_graphs(folder, manifest)
    # CUDA would leave a loop, and all that is in it, to the CPU, and be sent vectors that it has.
    opened = [graph for graph in manifest.graphs if provider == CPU or graph not in (TILES_GRAPH, POSITIONED_GRAPH)]
    sessions = {graph: Session(folder, provider, threads, graph, gpu_mem_limit_bytes) for graph in opened}
    for graph, session in sessions.items():
        declared = manifest.graphs[graph]
        _compare(graph, "inputs", declared.inputs, session.inputs)
        _compare(graph, "outputs", declared.outputs, session.outputs)
    _check_widths(manifest)
    if isinstance(manifest, StemManifest):
        _compare(GRAPH, "inputs", (manifest.input,), sessions[GRAPH].inputs)
    else:
        _check_inputs(manifest)
        for graph in filter(sessions.__contains__, TOKEN_GRAPHS):
            _probe(graph, manifest, sessions[graph] if provider == CPU else Session(folder, CPU, 1, graph))
        _check_tiles(manifest)
        if TILES_GRAPH in sessions:
            for length in (1, 2):  # one offset, and one for each token
                _probe(TILES_GRAPH, manifest, sessions[TILES_GRAPH], length)
    positions = tokens = None
    if isinstance(manifest, Manifest) and POSITIONED_GRAPH in sessions:
        positions = map_positions(folder, manifest)
        tokens = map_tokens(folder, positions)
        _check_positioned(manifest, sessions, positions, tokens)
    for session in sessions.values():
        session.warm({tensor.name: _least(tensor, manifest) for tensor in session.inputs})
    for file, stamp in stamps.items():
        if stamp_of(os.lstat(folder / file)) != stamp:
            raise ArtifactError(file, "a change while it was opened", "the file that was checked")
    served: dict[str, Any] = {
        "name": name,
        "version": version,
        "identity": identity,
        "parity": parity,
        "sessions": sessions,
        "created": int((folder / MANIFEST).stat().st_mtime),
    }
    if isinstance(manifest, StemManifest):
        return Stem(manifest=manifest, **served)
    tokenizer = Tokenizer(folder / TOKENIZER, manifest.files[TOKENIZER]) if TOKENIZER in manifest.files else None
    return Model(manifest=manifest, tokenizer=tokenizer, positions=positions, tokens=tokens, **served)


def _least(tensor: Tensor, manifest: Manifest | StemManifest) -> NDArray[Any]:
    """Return the smallest input that is legal: one of everything, and of an image one patch."""
    one = manifest.patch_size or 1 if isinstance(manifest, StemManifest) else 1
    shape = [size if isinstance(size, int) else one if axis > 1 else 1 for axis, size in enumerate(tensor.shape)]
    return np.zeros(shape, tensor.dtype)


def _check_widths(manifest: Manifest | StemManifest) -> None:
    """Compare the widths of outputs with those that the manifest promises."""
    graphs = filter(manifest.graphs.__contains__, TOKEN_GRAPHS)
    outputs = [tensor for graph in graphs for tensor in manifest.graphs[graph].outputs]
    widths = {tensor.name: (None, *tensor.shape)[-1] for tensor in outputs}
    for name, width in widths.items():
        if not isinstance(width, int):
            raise ArtifactError(f"{MANIFEST} graphs {name}", width, "an output whose last dimension is a number")
    promised = {"width": (manifest.width, EMBEDDINGS)}
    if isinstance(manifest, Manifest) and manifest.token_embeddings:
        lookup = manifest.token_embeddings
        promised[f"{TOKEN_EMBEDDINGS}.width"] = (lookup.width, lookup.output)
    for field, (told, output) in promised.items():
        if told != widths.get(output):
            raise ArtifactError(f"{MANIFEST} {field}", told, f"{widths.get(output)}, that of {output}")


def _check_inputs(manifest: Manifest) -> None:
    """Compare the inputs of the graphs of tokens with those that the manifest promises."""
    if missing := {"input_ids", *manifest.indices} - {tensor.name for tensor in manifest.graphs[GRAPH].inputs}:
        raise ArtifactError(f"{MANIFEST} indices", ", ".join(sorted(missing)), f"inputs of {GRAPH}")
    known = {"input_ids", "offset", "attention_mask", *manifest.indices}
    for graph in filter(manifest.graphs.__contains__, TOKEN_GRAPHS):
        if unknown := {tensor.name for tensor in manifest.graphs[graph].inputs} - known:
            raise ArtifactError(f"{graph} inputs", ", ".join(sorted(unknown)), ", ".join(sorted(known)))


def _check_tiles(manifest: Manifest) -> None:
    """Compare the graph of tiles with the plain one, in whose place it is run."""
    if (TILES_GRAPH in manifest.graphs) != (manifest.tiles is not None):
        allowed = f"one with {TILES_GRAPH}" if manifest.tiles else f"what {TILES_GRAPH} serves"
        raise ArtifactError(f"{MANIFEST} tiles", manifest.tiles, allowed)
    if manifest.tiles is None:
        return
    tiles, plain = manifest.graphs[TILES_GRAPH], manifest.graphs[manifest.plain]
    _compare(TILES_GRAPH, "inputs", tiles.inputs, plain.inputs)
    embeddings = tuple(tensor for tensor in plain.outputs if tensor.name == EMBEDDINGS)
    _compare(TILES_GRAPH, "outputs", tiles.outputs, embeddings)


def _check_positioned(
    manifest: Manifest, sessions: Mapping[str, Session], positions: Float32, tokens: TokenTable | None
) -> None:
    """Compare the graph that is given positions with the plain one at the first and last of them, and of the ids."""
    positioned, plain = manifest.graphs[POSITIONED_GRAPH], manifest.graphs[manifest.plain]
    given = tuple(tensor for tensor in positioned.inputs if tensor.name == POSITION_EMBEDDINGS)
    told = tuple(tensor for tensor in plain.inputs if tensor.name != "offset")
    _compare(POSITIONED_GRAPH, "inputs", positioned.inputs, (*told, *given))
    embeddings = tuple(tensor for tensor in plain.outputs if tensor.name == EMBEDDINGS)
    if len(positioned.outputs) > 1:
        embeddings += tuple(tensor.model_copy(update={"name": SUMMAND}) for tensor in embeddings)
    _compare(POSITIONED_GRAPH, "outputs", positioned.outputs, embeddings)
    ready = ReadyCalls(sessions[POSITIONED_GRAPH], positions, tokens, often=0)
    for offset, id_ in ((0, 0), (positions.shape[1] - 1, manifest.vocab_size - 1)):
        feeds = {tensor.name: np.zeros((1, 1), np.int64) for tensor in plain.inputs}
        feeds |= {"input_ids": np.array([[id_]]), "offset": np.array([offset])}
        twice = {name: values.repeat(2, 0) for name, values in feeds.items()}  # as requests that share a run
        expected = sessions[manifest.plain].run(feeds, [EMBEDDINGS])[EMBEDDINGS].tobytes()
        found = sessions[POSITIONED_GRAPH].run(place(feeds, positions))[EMBEDDINGS]
        again, both = ready.run(feeds), ready.run(twice)
        assert again is not None
        assert both is not None
        if found.tobytes() != expected or again.tobytes() != expected or both.tobytes() != 2 * expected:
            raise ArtifactError(f"{MANIFEST} positions", manifest.positions, f"the table of {manifest.plain}")


def _probe(graph: str, manifest: Manifest, session: Session, length: int = 1) -> None:
    """Look up the last of everything that the manifest allows, which a table that is too short refuses."""
    # Padding has no position.
    feeds = dict.fromkeys(manifest.indices, 0) | {"input_ids": int(manifest.padding_id == 0), "attention_mask": 1}
    last = {"input_ids": manifest.vocab_size, **manifest.indices, "offset": manifest.max_len or 1}
    names = {"input_ids": "vocab_size", "offset": "max_len"}
    shapes = {tensor.name: (1, length)[-len(tensor.shape) :] for tensor in session.inputs}
    for name in filter(shapes.__contains__, last):
        values = {"offset": 0, **feeds, name: last[name] - 1}
        given = {input_: np.full(shape, values[input_], np.int64) for input_, shape in shapes.items()}
        if why := session.refusal(given):
            field = f"{MANIFEST} {names.get(name, f'indices.{name}')}"
            raise ArtifactError(field, last[name], f"what {graph} has rows for ({why})")


def _compare(graph: str, side: str, declared: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    if declared != found:
        told, true = (
            ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in tensors) for tensors in (declared, found)
        )
        raise ArtifactError(f"{MANIFEST} graphs.{graph}.{side}", told, f"those of the graph: {true}")
