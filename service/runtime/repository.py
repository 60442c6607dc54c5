"""The models that are served: every version folder `<repository>/<name>/<version>/`, opened."""

import logging
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Literal

from preblock.service.artifacts.checksums import Checksums
from preblock.service.artifacts.manifest import DATA, MANIFEST, NAME
from preblock.service.core.auth import EVERYBODY, NOBODY, Authenticator, Principal
from preblock.service.core.errors import ArtifactError, Invalid, NotFound
from preblock.service.core.files import FileSignature, signature_of
from preblock.service.runtime.loader import load_model
from preblock.service.runtime.model import EncoderStem, TokenModel
from preblock.service.runtime.providers import ProviderChoice

LOG = logging.getLogger(__name__)
Models = dict[str, dict[int, TokenModel | EncoderStem]]
Fingerprint = tuple[tuple[str, FileSignature], ...]
VERSION = re.compile(r"[1-9][0-9]{0,8}")
UNLOADED = "unloaded"
"""The reason of an unloaded version."""


@dataclass(frozen=True)
class State:
    """The state of a version folder: "READY" to answer, "LOADING", or "UNAVAILABLE" for a reason."""

    name: str
    version: int
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = ""


class Repository:
    """The models of a folder, which can follow it as it changes.

    Args:
        root: the folder.
        provider: onnxruntime name of the sessions' provider.
        threads: of one session call.
        cache: folder of the hash cache; default None: each file is read and hashed.
        access: says which models a caller may use; every model that a protocol asks for is found here. Default: all.
        choice: how the provider was chosen; default: by name.
        gpu_mem_limit_bytes: most memory of a GPU that one graph takes; default None: all that there is.

    Attributes:
        listeners: functions that a refresh calls in its thread, after a model is replaced or gone.

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
        choice: ProviderChoice | None = None,
        gpu_mem_limit_bytes: int | None = None,
    ) -> None:
        self.root = root
        self.choice = choice or ProviderChoice(provider, provider, None, None)
        self.access = access
        self._opener = partial(load_model, provider=provider, threads=threads, gpu_mem_limit_bytes=gpu_mem_limit_bytes)
        self._cache = cache
        # A request keeps the model that it found: these are replaced as a whole, never changed.
        self._models: Models = {}
        self._states: dict[tuple[str, int], State] = {}
        self._seen: dict[tuple[str, int], Fingerprint] = {}
        self._opened: dict[tuple[str, int], Fingerprint] = {}
        self._one_at_a_time = Lock()
        self.listeners: list[Callable[[], None]] = []
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
            models: Models = {}
            states: dict[tuple[str, int], State] = {}
            self._broken: dict[tuple[str, int], ArtifactError] = {}
            checksums = Checksums(self._cache)
            try:
                for name, version, folder in find_artifacts(self.root):
                    if name in unloaded:
                        states[name, version] = State(name, version, "UNAVAILABLE", UNLOADED)
                        self._seen.pop((name, version), None)
                        continue
                    model, states[name, version] = self._follow(name, version, folder, checksums)
                    if model is not None:
                        models.setdefault(name, {})[version] = model
            finally:
                checksums.save()
            replaced = {id(model) for model in _all(self._models)} - {id(model) for model in _all(models)}
            before, self._models, self._states = self._states, models, states
            gone = [State(*key, "UNAVAILABLE", "gone") for key in before if key not in states]
            self._seen = {key: seen for key, seen in self._seen.items() if key in states}
            self._opened = {key: seen for key, seen in self._opened.items() if key in states}
            if replaced:
                for listener in self.listeners:
                    listener()
            return [*gone, *(state for key, state in states.items() if before.get(key) != state)]

    def _follow(
        self, name: str, version: int, folder: Path, checksums: Checksums
    ) -> tuple[TokenModel | EncoderStem | None, State]:
        """Return the model of a folder, and its state; the same as before if no file has changed."""
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

    def index(self, caller: Principal = NOBODY) -> list[State]:
        """Return the state of every version folder in the scope of `caller`, by name and version."""
        return [state for _, state in sorted(self._states.items()) if self.access.shows(state.name, caller)]

    def get(self, name: str, version: str | None = None, caller: Principal = NOBODY) -> TokenModel:
        """Return a model of token ids: the version named, or its highest.

        Raises:
            Forbidden: `caller` may not use it.
            NotFound: no such model or version.
            Invalid: it takes something else.

        """
        found = self.find(name, version, caller)
        if isinstance(found, EncoderStem):
            allowed = f"one of token ids; this takes {found.manifest.input.name}, by the Open Inference Protocol"
            raise Invalid("model", name, allowed)
        return found

    def find(self, name: str, version: str | None = None, caller: Principal = NOBODY) -> TokenModel | EncoderStem:
        """Return a model of any kind: the version named, or its highest.

        Raises:
            Forbidden: `caller` may not use it.
            NotFound: no such model or version.

        """
        self.access.check_model(name, caller)
        versions = self._models.get(name)
        if versions is None:
            raise NotFound("model", name, ", ".join(name for name in self._models if self.access.shows(name, caller)))
        if not version:
            return versions[max(versions)]
        if not VERSION.fullmatch(version) or int(version) not in versions:
            raise NotFound("version", version, ", ".join(map(str, sorted(versions))))
        return versions[int(version)]

    def select(
        self, name: str | None, version: str | None, caller: Principal = NOBODY
    ) -> list[TokenModel | EncoderStem]:
        """Return the version named of a model, all its versions where none is, or all models where no name is given.

        Raises:
            Forbidden: `caller` may not use it.
            NotFound: no such model or version.

        """
        if not name and not version:
            return self.all(caller)
        found = self.find(name or "", version, caller)
        return [found] if version else [model for model in self.all(caller) if model.name == name]

    def versions(self, name: str) -> list[int]:
        """Return the versions of the model `name`, ascending; none where it is being unloaded."""
        return sorted(self._models.get(name, ()))

    def newest(self, caller: Principal = NOBODY) -> list[TokenModel | EncoderStem]:
        """Return the highest version of each model in the scope of `caller`, by name."""
        models = sorted(self._models.items())
        return [versions[max(versions)] for name, versions in models if self.access.shows(name, caller)]

    def all(self, caller: Principal = NOBODY) -> list[TokenModel | EncoderStem]:
        """Return every version of every model in the scope of `caller`, by name and version."""
        models = [versions for name, versions in sorted(self._models.items()) if self.access.shows(name, caller)]
        return [model for versions in models for _, model in sorted(versions.items())]


def _all(models: Models) -> Iterator[TokenModel | EncoderStem]:
    return chain.from_iterable(versions.values() for versions in models.values())


def _fingerprint(folder: Path) -> Fingerprint:
    """Return the stamps of the files of an artifact; they change when a file does."""
    try:
        return tuple(sorted((file.name, signature_of(file.lstat())) for file in folder.iterdir()))
    except OSError:
        return ()


def _changed_in_place(before: Fingerprint, now: Fingerprint) -> bool:
    """Return whether the data file, which is mapped, is the same as before, but of another size or time of change."""
    # Another file may have got the inode of a file without a mapping.
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
