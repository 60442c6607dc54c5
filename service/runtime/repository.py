"""The model repository: every version folder `<repository>/<name>/<version>/`, its state, and its opened model."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple

from preblock.service.artifacts.catalog import VERSION, find_artifacts
from preblock.service.artifacts.checksums import Checksums
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import DATA, MANIFEST, SOFT_PROMPTS
from preblock.service.artifacts.references import read_signatures
from preblock.service.core.auth import EVERYBODY, NOBODY, Authenticator, Principal
from preblock.service.core.errors import ArtifactError, Invalid, NotFound, Unavailable
from preblock.service.core.files import SCARCE, FileSignature, signature_of, unreadable
from preblock.service.runtime.loader import ModelLoader
from preblock.service.runtime.model import EncoderStem, ServedModel, TokenModel

LOG = logging.getLogger(__name__)
Fingerprint = tuple[tuple[str, FileSignature], ...]
UNLOADED = "unloaded"
"""The reason of a version whose model is not loaded, or no longer."""
LACK = re.compile("bad_alloc|Failed to allocate memory|Cannot allocate memory|Too many open files")
"""Texts of onnxruntime's errors that may pass; it has no kind of exception for them."""


@dataclass(frozen=True)
class VersionState:
    """The state of a version folder: "READY", "LOADING", or "UNAVAILABLE" for a reason."""

    name: str
    version: int
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = ""


class VersionEntry(NamedTuple):
    """One version folder.

    Args:
        state: reported to callers.
        model: serves requests; None if the version is unavailable.
        seen: fingerprint of the last load attempt; None: load again at the next refresh.
        opened: fingerprint of `model`.
        error: of the last load attempt, or of a changed reference, if there was one.
        references: paths of files outside the artifact with rows of its tables.

    """

    state: VersionState
    model: ServedModel | None = None
    seen: Fingerprint | None = None
    opened: Fingerprint = ()
    error: ArtifactError | Unavailable | None = None
    references: tuple[str, ...] = ()

    @property
    def lost(self) -> bool:
        """Whether the version served once, and a referenced file has changed since."""
        return self.model is None and any(Path(name).is_absolute() for name, _ in self.opened)

    def check_references(self) -> "VersionEntry":
        """Return this entry; without its model if a referenced file has changed."""
        opened, now = dict(self.opened), read_signatures(self.references)
        changed = [path for path in self.references if path in opened and now.get(path) != opened[path]]
        if self.model is None or not changed:
            return self
        name, version = self.state.name, self.state.version
        got = "a change" if changed[0] in now else "no such file"
        field = f"{name}/{version}/references {changed[0]}"
        error = ArtifactError(field, got, "the file as it was opened")
        if isinstance(self.model, TokenModel) and self.model.ngrams is not None:
            self.model.ngrams.close()  # a stream keeps its model
        return self._replace(
            state=VersionState(name, version, "UNAVAILABLE", str(error)), model=None, seen=None, error=error
        )


def _log_changes(before: Mapping[tuple[str, int], VersionEntry], after: Mapping[tuple[str, int], VersionEntry]) -> None:
    """Log a line for each version that was loaded, replaced, unloaded or removed, or cannot be opened."""
    for name, version in sorted({*before, *after}):
        old, new = (entries.get((name, version)) for entries in (before, after))
        was, now = (None if entry is None else entry.model for entry in (old, new))
        model = f"model {name} version {version}"
        if new is not None and new.error is not None and (old is None or str(new.error) != str(old.error)):
            state = "cannot be opened; the old one serves" if now else "cannot be opened; it is unavailable"
            LOG.warning("%s %s: %s", model, "is out of service" if new.lost else state, new.error)
        elif now is not was:
            if now is None:
                LOG.info("%s %s", model, "removed" if new is None else "unloaded")
            else:
                LOG.info("%s %s", model, "loaded" if was is None else "replaced")


def _name_failure(place: str, error: Exception) -> ArtifactError | Unavailable:
    """Return the error of the version in `place` for an exception of its opening; Unavailable if it may open later."""
    scarce = isinstance(error, MemoryError | Unavailable) or getattr(error, "errno", None) in SCARCE
    if scarce or any(LACK.search(str(cause)) for cause in (error, error.__cause__)):
        reason = "too little memory, or too many open files"
        message = f"{place} cannot be opened now: {reason}"
        return Unavailable(place, reason, "free descriptors and memory", message=message)
    if isinstance(error, OSError):
        error = unreadable(str(error.filename or "a file"), error)
    if not isinstance(error, ArtifactError):
        LOG.error("%s cannot be opened: internal error", place, exc_info=error)
        message = f"{MANIFEST}: the artifact cannot be opened; see the log"
        error = ArtifactError(MANIFEST, "an internal error", "an artifact to run", message=message)
    return ArtifactError(f"{place}/{error.field}", error.got, error.expected, message=f"{place}/{error}")


def fingerprint(folder: Path, references: Iterable[str] = ()) -> Fingerprint:
    """Return the signatures of an artifact's files, and of `references`; they change when a file does.

    Raises:
        OSError: the process lacks descriptors or memory.

    """
    try:
        # Of the target of a link: a changed file in a hub's cache must be seen.
        files = sorted((file.name, signature_of(file.stat(follow_symlinks=file.exists()))) for file in folder.iterdir())
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return ()
    return (*files, *sorted(read_signatures(references).items()))


def _read_references(folder: Path) -> tuple[str, ...]:
    """Return the paths of the files referenced by the artifact in `folder`; none for a damaged artifact."""
    try:
        manifest = read_manifest(folder)
    except (ArtifactError, Unavailable):  # the opening names the reason
        return ()
    return tuple(manifest.references) if isinstance(manifest, Manifest) else ()


def changed_in_place(before: Fingerprint, now: Fingerprint) -> bool:
    """Return whether a mapped file is the same as before, but with another size or time of change.

    Any change of a file outside the artifact counts, because the manifest states its size and time.
    """
    then, found = dict(before), dict(now)
    if any(Path(name).is_absolute() and found.get(name) != then[name] for name in then):
        return True
    # Another file may have received the inode of a file without a mapping.
    pairs = [(then[file], found[file]) for file in (DATA, SOFT_PROMPTS) if file in then and file in found]
    return any(old[:2] == new[:2] and old[2:4] != new[2:4] for old, new in pairs)


class Repository:
    """The models of a folder, reloaded by `refresh` as the folder changes.

    Args:
        root: the folder.
        loader: opens the artifacts; default: on the CPU, without options.
        cache: folder of the hash cache; default None: every file is read and hashed.
        access: authorizes each lookup of a model; default: every caller may use every model.
        aliases: model by further name. A folder with such a name is not opened.
        loaded, versions: opened at first, as in `refresh`.
        loading_hint: for the error of a missing model: how the server loads a new one.

    Attributes:
        listeners: functions without arguments. They are called after a model is replaced or removed, in that thread.

    Raises:
        ArtifactError: an artifact is broken or was tampered with, or there is no folder.

    """

    def __init__(
        self,
        root: Path,
        loader: ModelLoader | None = None,
        cache: Path | None = None,
        access: Authenticator = EVERYBODY,
        aliases: Mapping[str, str] | None = None,
        loaded: Collection[str] | None = None,
        versions: Collection[tuple[str, int]] | None = None,
        loading_hint: str = "",
    ) -> None:
        self.root, self.loading_hint = root, loading_hint
        loader = loader or ModelLoader()
        self.choice, self.access, self._load = loader.choice, access, loader.load
        self._cache, self._aliases = cache, aliases or {}
        # All three are replaced as a whole, never changed: a request keeps the model that it found.
        self._models: dict[str, dict[int, ServedModel]] = {}
        self._lost: set[tuple[str, int]] = set()
        self._entries: dict[tuple[str, int], VersionEntry] = {}
        self._refresh_lock, self._entries_lock = Lock(), Lock()
        self._opened = self._is_idle = False
        self.listeners: list[Callable[[], None]] = []
        self.refresh(loaded, versions)
        for entry in self._entries.values():
            if entry.error is not None:
                raise entry.error

    def refresh(
        self, loaded: Collection[str] | None = None, versions: Collection[tuple[str, int]] | None = None
    ) -> list[VersionState]:
        """Open new and changed versions, drop removed ones and those of other models, and return the changed states.

        Only the models `loaded` are served; default: all. Of the folder only `versions` count: names and numbers;
        default: all.

        A version with an error does not affect others. The next refresh tries the models of `lacking` again. If a
        version was ready before, the old model keeps serving, unless a mapped file was changed in place: the mapped
        memory then differs from the checked file. Requests in flight keep a dropped model; its memory is released
        after the last one. A refresh may take minutes, and may run beside requests.

        Raises:
            ArtifactError: the folder cannot be read, or has lost all its models; nothing changes.
            OSError: as ArtifactError, for a lack of descriptors or memory.

        """
        with self._refresh_lock:
            entries: dict[tuple[str, int], VersionEntry] = {}
            checksums = Checksums(self._cache)
            try:
                wanted = versions or self._entries
                for name, version, folder in find_artifacts(self.root, wanted, may_be_empty=not wanted):
                    if versions is not None and (name, version) not in versions:
                        continue
                    if name in self._aliases:
                        reason = f"its name is an alias of {self._aliases[name]}"
                        entry = VersionEntry(VersionState(name, version, "UNAVAILABLE", reason))
                    elif loaded is not None and name not in loaded:
                        entry = VersionEntry(VersionState(name, version, "UNAVAILABLE", UNLOADED))
                    else:
                        entry = self._load_if_changed(name, version, folder, checksums)
                    entries[name, version] = entry
            finally:
                checksums.save()
            with self._entries_lock:
                # A file may have changed since its version was read here.
                entries = {key: entry.check_references() for key, entry in entries.items()}
                before = self._replace_entries(entries)
            self._is_idle = loaded is not None and not any(name in loaded for name, _ in entries)
            gone = [VersionState(*key, "UNAVAILABLE", "gone") for key in before if key not in entries]
            known = {entry.state for entry in before.values()}
            return [*gone, *(entry.state for entry in entries.values() if entry.state not in known)]

    def _load_if_changed(self, name: str, version: int, folder: Path, checksums: Checksums) -> VersionEntry:
        """Return the entry of a folder: a new one if a file has changed, else the current one."""
        loading = VersionState(name, version, "LOADING")
        before = self._entries.get((name, version), VersionEntry(loading))
        if before.seen == fingerprint(folder, before.references):
            return before
        references = _read_references(folder)
        opened = fingerprint(folder, references)
        watched = tuple(dict.fromkeys((*references, *before.references)))  # the old model may be kept
        seen = fingerprint(folder, watched)
        with self._entries_lock:
            self._entries = self._entries | {(name, version): before._replace(state=loading, seen=None)}
        try:
            model = self._load(name, version, folder, checksums)
        except Exception as error:  # onnxruntime's exceptions share no narrower parent
            failure = _name_failure(f"{name}/{version}", error)
            kept = None if changed_in_place(before.opened, seen) else before.model
            state = VersionState(name, version, "UNAVAILABLE" if kept is None else "READY", str(failure))
            tried = None if isinstance(failure, Unavailable) else seen
            return VersionEntry(state, kept, tried, before.opened, failure, watched)
        return VersionEntry(VersionState(name, version, "READY"), model, opened, opened, references=references)

    @property
    def lacking(self) -> set[str]:
        """Names of models with a version that could not be opened for lack of descriptors or memory."""
        return {name for (name, _), entry in self._entries.items() if isinstance(entry.error, Unavailable)}

    @property
    def is_ready(self) -> bool:
        """Whether a model is served, or no model of the folder is to be."""
        return bool(self._models) or self._is_idle

    def check_ready(self) -> None:
        """Raise Unavailable unless the repository is ready."""
        if not self.is_ready:
            message = "no model is served: the repository holds none that can be opened; `preblock export` adds one"
            raise Unavailable("models", "none", "at least one", message=message)

    @property
    def has_references(self) -> bool:
        """Whether an open version refers to files outside its artifact."""
        return any(entry.model and entry.references for entry in self._entries.values())

    def drop_changed(self) -> None:
        """Drop each version that refers to a file changed since it was opened; `find` then raises Unavailable."""
        with self._entries_lock:
            self._replace_entries({key: entry.check_references() for key, entry in self._entries.items()})

    def _replace_entries(self, entries: dict[tuple[str, int], VersionEntry]) -> dict[tuple[str, int], VersionEntry]:
        """Serve the models of `entries`, log the changes, call the listeners, and return the entries before."""
        before, self._entries = self._entries, entries
        models: dict[str, dict[int, ServedModel]] = {}
        for (name, version), entry in entries.items():
            if entry.model is not None:
                models.setdefault(name, {})[version] = entry.model
        self._models = models
        self._lost = {key for key, entry in entries.items() if entry.lost}
        if self._opened:
            _log_changes(before, entries)
        self._opened = True
        kept = {id(entry.model) for entry in entries.values()}
        if any(entry.model is not None and id(entry.model) not in kept for entry in before.values()):
            for listener in self.listeners:
                listener()
        return before

    def check_aliases(self) -> None:
        """Raise Invalid if an alias is the name of a model, or if a repository with models lacks the alias's one."""
        names = {name for name, _ in self._entries}
        for alias, model in self._aliases.items():
            if alias in names:
                message = f"the alias {alias} of {model} is the name of another model of the repository {self.root}"
                raise Invalid("aliases", f"{alias}={model}", "a name without a model", message=message)
            if names and model not in names:
                message = (
                    f"alias {alias}: the repository {self.root} has no model {model}; it has {', '.join(sorted(names))}"
                )
                raise Invalid("aliases", f"{alias}={model}", ", ".join(sorted(names)), message=message)

    def check_models(self, setting: str, names: Collection[str]) -> None:
        """Raise Invalid if the repository lacks one of these models of a setting."""
        known = sorted({name for name, _ in self._entries})
        for name in names:
            if name not in known:
                expected = ", ".join(known) or "nothing, since the repository holds no model"
                raise Invalid(setting, name, expected)

    def resolve(self, name: str) -> str:
        """Return the model of an alias; the name of a model stays."""
        return self._aliases.get(name, name)

    def states(self) -> list[VersionState]:
        """Return the state of every version folder, by name and version."""
        return [entry.state for _, entry in sorted(self._entries.items())]

    def index(self, caller: Principal = NOBODY) -> list[VersionState]:
        """Return the state of every version in the scope of `caller`, by name and version, under each of its names."""
        shown = [state for state in self.states() if self.access.shows(state.name, caller)]
        aliases = [
            replace(state, name=alias)
            for alias, model in self._aliases.items()
            for state in shown
            if state.name == model
        ]
        names = {(state.name, state.version): state for state in [*shown, *aliases]}
        return [state for _, state in sorted(names.items())]

    def get(self, name: str, version: str | None = None, caller: Principal = NOBODY) -> TokenModel:
        """Return a model of token ids: the named version, or the highest.

        Raises:
            Forbidden: `caller` may not use it.
            NotFound: no such model or version.
            Invalid: the model takes other inputs.

        """
        found = self.find(name, version, caller)
        if isinstance(found, EncoderStem):
            input_ = found.manifest.input.name
            message = f"the model {name!r} takes {input_} by the Open Inference Protocol, not token ids"
            raise Invalid("model", name, "a model of token ids", message=message)
        return found

    def find(self, name: str, version: str | None = None, caller: Principal = NOBODY) -> ServedModel:
        """Return a model of any kind: the named version, or the highest.

        Raises:
            Forbidden: `caller` may not use it.
            NotFound: no such model or version.
            Unavailable: a file that the version refers to has changed.

        """
        own = self.resolve(name)
        self.access.check_model(own, caller, name)
        versions = self._models.get(own)
        if self._lost:
            self._check_lost(own, version)
        if versions is None:
            expected = ", ".join(self.newest(caller)) or "nothing, since no model is loaded"
            raise NotFound("model", name, expected, hint=self.loading_hint)
        if not version:
            return versions[max(versions)]
        if not VERSION.fullmatch(version) or int(version) not in versions:
            raise NotFound("version", version, ", ".join(map(str, sorted(versions))), hint=self.loading_hint)
        return versions[int(version)]

    def _check_lost(self, name: str, version: str | None) -> None:
        """Raise Unavailable if a version is lost, or without `version` the highest one."""
        numbers = [number for found, number in self._entries if found == name]
        number = int(version) if version and VERSION.fullmatch(version) else max(numbers, default=0)
        if (name, number) in self._lost:
            place = f"{name}/{number}"
            message = f"{place} is out of service: a file that it refers to has changed; the log names it"
            raise Unavailable(place, "a changed file", "the file as it was opened", message=message)

    def select(self, name: str | None, version: str | None, caller: Principal = NOBODY) -> list[ServedModel]:
        """Return one version of a model; all its versions without `version`; all models without `name` too.

        Raises:
            Forbidden: `caller` may not use it.
            NotFound: no such model or version.

        """
        if not name and not version:
            return self.all(caller)
        found = self.find(name or "", version, caller)
        return [found] if version else [model for model in self.all(caller) if model.name == found.name]

    def versions(self, name: str) -> list[int]:
        """Return the served versions of the model `name`, ascending; empty if it was unloaded."""
        return sorted(self._models.get(self.resolve(name), ()))

    def newest(self, caller: Principal = NOBODY) -> dict[str, ServedModel]:
        """Return the highest version of each model in the scope of `caller` by each of its names, sorted."""
        models = {model.name: model for model in self.all(caller)}
        aliases = {alias: models[model] for alias, model in self._aliases.items() if model in models}
        return dict(sorted((models | aliases).items()))

    def all(self, caller: Principal = NOBODY) -> list[ServedModel]:
        """Return every version of every model in the scope of `caller`, by name and version."""
        models = [versions for name, versions in sorted(self._models.items()) if self.access.shows(name, caller)]
        return [model for versions in models for _, model in sorted(versions.items())]
