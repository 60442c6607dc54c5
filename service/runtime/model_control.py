"""Reloads models: new versions in the folder, and requests to load and unload models."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from preblock.service.artifacts.catalog import find_artifacts
from preblock.service.core.auth import NOBODY, Principal
from preblock.service.core.errors import ArtifactError, Forbidden, NotFound, Unavailable
from preblock.service.core.tasks import start_thread
from preblock.service.runtime.repository import UNLOADED, Repository
from preblock.service.runtime.worker_states import (
    FIRST_STATE,
    AppliedState,
    DesiredState,
    applied,
    applied_file,
    behind,
    forget_ended,
    read_desired,
    write_change,
)

LOG = logging.getLogger(__name__)
POLL_INTERVAL_SECONDS = 0.05
"""Time between two checks for a change requested from another worker."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
"""Times until the next attempt at a version without enough memory or descriptors: each is twice the one before."""
FOLLOW_TIMEOUT_SECONDS = 60.0
"""Time until all workers must have applied a requested change."""

WORKER_FOLDER = "the folder of the workers"

Mode = Literal["none", "poll", "explicit"]
Result = TypeVar("Result")


def loading_hint(mode: Mode, poll_interval_seconds: float) -> str:
    """Return how the service loads a model that is exported after the start."""
    match mode:
        case "poll":
            return f"a new export is served within about {poll_interval_seconds:g} s"
        case "explicit":
            return "POST /v2/repository/models/NAME/load, or RepositoryModelLoad over gRPC, loads a model"
        case _:
            return "a new export is served after a restart, or by a server with --model-control poll"


class ModelControl:
    """Loads and unloads models while the service runs.

    Args:
        repository: the models.
        mode: "none" for no changes, "poll" to reload on changes of the folder, "explicit" to reload on request.
        poll_interval_seconds: time between two checks of the folder, and of files outside the artifacts.
        shared: folder through which several workers agree; default None: one worker.
        desired: state of `repository`. In the mode "explicit", all its models are loaded at first unless it says which.

    """

    def __init__(
        self,
        repository: Repository,
        mode: Mode,
        poll_interval_seconds: float,
        shared: Path | None = None,
        desired: DesiredState = FIRST_STATE,
    ) -> None:
        self._repository, self._mode, self._shared = repository, mode, shared
        self._poll_interval_seconds = poll_interval_seconds
        if mode == "explicit" and desired.loaded is None:
            desired = desired.model_copy(update={"loaded": frozenset(state.name for state in repository.states())})
        self._desired = desired
        self._pause = self._retry_at = 0.0
        self._refresh_lock = asyncio.Lock()

    def first_state(self) -> DesiredState:
        """Return the state to be desired of workers: the found versions, or the whole folder in mode poll."""
        states = self._repository.states()
        versions = None if self._mode == "poll" else frozenset((state.name, state.version) for state in states)
        return DesiredState(versions=versions, loaded=self._desired.loaded)

    async def join(self) -> None:
        """Apply the latest change before the first request. From here on the other workers wait for this one."""
        if self._mode == "explicit" and self._shared is not None:
            with suppress(ArtifactError, Unavailable):  # `run` tries it again
                with _named_errors(WORKER_FOLDER):
                    forget_ended(self._shared)
                self._record(self._shared, self._desired)
                await self._reconcile()

    async def run(self) -> None:
        """Apply changes until cancelled. A failed check is logged and repeated later."""
        if self._mode == "none":
            return
        check, seconds = self._reconcile, POLL_INTERVAL_SECONDS
        if self._mode == "poll":
            check, seconds = self._refresh, self._poll_interval_seconds
        elif self._shared is None:
            check = self._repeat_failed
        while True:
            try:
                await check()
            except ArtifactError:
                await asyncio.sleep(MIN_PAUSE_SECONDS)  # it is logged, and nothing has changed
            except Unavailable as error:  # such as too many open files, or a full disk
                LOG.warning("%s; the next check follows", error)
                await asyncio.sleep(MIN_PAUSE_SECONDS)
            await asyncio.sleep(seconds)

    async def watch_references(self) -> None:
        """Drop versions that refer to changed files, in every mode, until cancelled."""
        while True:
            if self._repository.has_references:
                await asyncio.wrap_future(start_thread(self._repository.drop_changed, "watch references"))
            await asyncio.sleep(self._poll_interval_seconds)

    async def load(self, name: str, caller: Principal = NOBODY) -> None:
        """Load the new versions of a model, or all versions of one that is not loaded, in all workers.

        Raises:
            Forbidden: the mode or the caller's key does not allow it.
            NotFound: the folder has no such model.
            ArtifactError: a version cannot be opened; other versions are unchanged.
            Unavailable: a worker did not apply the change in time, or lacks descriptors, memory or disk space.

        """
        name = self._check_allowed(name, caller)
        known = [(state.name, state.version) for state in self._repository.states()]
        read = partial(find_artifacts, self._repository.root, known, may_be_empty=not known)
        found_artifacts = await _read_repository(read)
        names = {found for found, _, _ in found_artifacts}
        if name not in names:
            shown = sorted(found for found in names if self._repository.access.shows(found, caller))
            raise NotFound("model", name, ", ".join(shown) or "nothing, since the repository holds no model")
        await self._change(name, unloaded=False)
        for state in self._repository.index(caller):
            # Another request may have unloaded it again.
            if state.name == name and state.reason not in ("", UNLOADED):
                place = f"{name}/{state.version}"
                if name in self._repository.lacking:
                    raise Unavailable(place, state.reason, "free descriptors and memory", message=state.reason)
                message = f"{place} cannot be opened: {state.reason}"
                raise ArtifactError(place, state.reason, "an artifact to run", message=message)
        await self._check_workers(name)

    async def unload(self, name: str, caller: Principal = NOBODY) -> None:
        """Drop every version of a model in all workers, each after its last request.

        Raises:
            Forbidden: the mode or the caller's key does not allow it.
            NotFound: there is no such model.
            Unavailable: as `load`.

        """
        name = self._check_allowed(name, caller)
        names = {state.name for state in self._repository.index(caller)}
        if name not in names:
            raise NotFound("model", name, ", ".join(sorted(names)) or "nothing, since the repository holds no model")
        await self._change(name, unloaded=True)

    async def _check_workers(self, name: str) -> None:
        """Raise Unavailable if a worker has not opened a version of the model `name` for now."""
        if self._shared is None:
            return
        with _named_errors(WORKER_FOLDER):
            states = await asyncio.to_thread(applied, self._shared)
        if count := sum(name in state.lacking for state in states.values()):
            message = f"{count} workers cannot open {name!r} now, for lack of descriptors or memory; they try again"
            raise Unavailable("workers", f"{count} without {name}", "all workers", message=message)

    def _check_allowed(self, requested: str, caller: Principal) -> str:
        """Return the name of the requested model."""
        name = self._repository.resolve(requested)
        self._repository.access.check_admin(name, caller, requested)
        if self._mode != "explicit":
            message = f"models are not loaded or unloaded by request: model_control is {self._mode}, not explicit"
            raise Forbidden("model", requested, "model_control explicit", message=message)
        return name

    async def _change(self, name: str, unloaded: bool) -> None:
        if self._shared is None:
            async with self._refresh_lock:
                self._desired = self._desired.change(name, unloaded)
                await self._refresh_to(self._desired)
            return
        number = await _read_repository(partial(write_change, self._shared, self._repository.root, name, unloaded))
        await self._reconcile()
        deadline = asyncio.get_running_loop().time() + FOLLOW_TIMEOUT_SECONDS
        with _named_errors(WORKER_FOLDER):
            while late := behind(self._shared, number):
                if asyncio.get_running_loop().time() > deadline:
                    message = f"{len(late)} workers have not applied the change of {name!r} yet"
                    raise Unavailable("workers", f"{len(late)} without the change", "all workers", message=message)
                await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _reconcile(self) -> None:
        """Apply a changed desired state, and record its number and the names in `Repository.lacking`."""
        assert self._shared is not None
        async with self._refresh_lock:
            with _named_errors(WORKER_FOLDER):
                desired, own = read_desired(self._shared), applied_file(self._shared, os.getpid())
                if desired.number == self._desired.number and own.exists() and not self._retry_is_due():
                    return
            failed: ArtifactError | None = None
            try:
                await self._refresh_to(desired)
            except ArtifactError as error:  # the other workers find the same folder
                failed = error
            self._record(self._shared, desired)
            self._desired = desired
        if failed is not None:
            raise failed

    def _record(self, shared: Path, desired: DesiredState) -> None:
        """Tell the other workers that this one has applied a state."""
        state = AppliedState(number=desired.number, lacking=frozenset(self._repository.lacking))
        with _named_errors(WORKER_FOLDER):
            applied_file(shared, os.getpid()).write_text(state.model_dump_json())

    async def _refresh(self) -> None:
        async with self._refresh_lock:
            await self._refresh_to(self._desired)

    async def _repeat_failed(self) -> None:
        """Refresh again if a version could not be opened for now."""
        if self._retry_is_due():
            await self._refresh()

    async def _refresh_to(self, desired: DesiredState) -> None:
        await _read_repository(partial(self._repository.refresh, desired.loaded, desired.versions))
        lacking = bool(self._repository.lacking)
        self._pause = min(max(2 * self._pause, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS) if lacking else 0.0
        self._retry_at = time.monotonic() + self._pause

    def _retry_is_due(self) -> bool:
        return bool(self._repository.lacking) and time.monotonic() >= self._retry_at


async def _read_repository(read: Callable[[], Result]) -> Result:
    """Call `read` in a thread. An error of the folder is logged, and raised without its path."""
    try:
        with _named_errors("the repository"):
            return await asyncio.wrap_future(start_thread(read, "read the repository"))
    except ArtifactError as error:
        LOG.warning("the repository cannot be read; the loaded models keep serving: %s", error)
        message = "the repository cannot be read; see the log"
        raise ArtifactError("repository", "an unreadable folder", "a folder with models", message=message) from error


@contextmanager
def _named_errors(place: str) -> Iterator[None]:
    """Raise Unavailable in place of OSError."""
    try:
        yield
    except OSError as error:
        reason = str(error.strerror).lower()
        message = f"{place} cannot be used now: {reason}; try again later"
        raise Unavailable(place, reason, "free descriptors, memory and disk space", message=message) from error
