"""Follows the repository: new versions, and requests to load and unload models.

Several workers agree through a folder: `desired.json` names the unloaded models and has a number that grows with every
change; `<pid>.followed` holds the last number that a worker applied.
"""

import asyncio
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from preblock.service.core.auth import NOBODY, Principal
from preblock.service.core.errors import ArtifactError, Forbidden, NotFound, Unavailable
from preblock.service.runtime.repository import UNLOADED, Repository, VersionState, find_artifacts

LOG = logging.getLogger(__name__)
POLL_INTERVAL_SECONDS = 0.05
"""How often a worker looks whether another one was asked for a change."""
FOLLOW_TIMEOUT_SECONDS = 60.0
"""How long a request for a change waits until all workers have followed."""

Mode = Literal["none", "poll", "explicit"]


class DesiredState(BaseModel):
    """The desired state of all workers: every model of the folder except `unloaded`."""

    number: int = 0
    unloaded: frozenset[str] = frozenset()


class ModelControl:
    """Loads and unloads models while they are served.

    Args:
        repository: the models.
        mode: "none" for no change, "poll" to follow the folder, "explicit" to follow it when asked.
        seconds: between two looks at the folder.
        shared: folder through which several workers agree; None for one worker.

    """

    def __init__(self, repository: Repository, mode: Mode, seconds: float, shared: Path | None = None) -> None:
        self._repository, self._mode, self._poll_interval_seconds, self._shared = repository, mode, seconds, shared
        self._desired = DesiredState()
        self._refresh_lock = asyncio.Lock()

    async def run(self) -> None:
        """Follow until cancelled."""
        if self._mode == "poll":
            while True:
                await asyncio.sleep(self._poll_interval_seconds)
                with _log_failed_poll():
                    await self._refresh()
        if self._mode == "explicit" and self._shared is not None:
            while True:
                with _log_failed_poll():
                    await self._reconcile()
                await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def load(self, name: str, caller: Principal = NOBODY) -> None:
        """Load the new versions of a model, also of an unloaded one; return when all workers have done so.

        Raises:
            Forbidden: the mode, or the key of the caller, does not allow it.
            NotFound: the folder has no such model.
            ArtifactError: a version of it cannot be opened; the others are as they were.
            Unavailable: a worker did not follow in time.

        """
        self._check_allowed(name, caller)
        with _hide_repository_path():
            names = {found for found, _, _ in await asyncio.to_thread(find_artifacts, self._repository.root)}
        if name not in names:
            raise NotFound(
                "model",
                name,
                ", ".join(sorted(found for found in names if self._repository.access.shows(found, caller))),
            )
        await self._change(name, unloaded=False)
        for state in self._repository.index(caller):
            # Another request may have unloaded it since.
            if state.name == name and state.reason not in ("", UNLOADED):
                raise ArtifactError(f"{name}/{state.version}", state.reason, "an artifact that can be opened")

    async def unload(self, name: str, caller: Principal = NOBODY) -> None:
        """Let go of every version of a model, each after its last request; return when all workers have.

        Raises:
            Forbidden: the mode, or the key of the caller, does not allow it.
            NotFound: there is no such model.
            Unavailable: a worker did not follow in time.

        """
        self._check_allowed(name, caller)
        if name not in {state.name for state in self._repository.index(caller)}:
            raise NotFound("model", name, ", ".join(sorted({state.name for state in self._repository.index(caller)})))
        await self._change(name, unloaded=True)

    def _check_allowed(self, name: str, caller: Principal) -> None:
        self._repository.access.check_admin(name, caller)
        if self._mode != "explicit":
            raise Forbidden("model", name, f"changes by request with model_control explicit; it is {self._mode}")

    async def _change(self, name: str, unloaded: bool) -> None:
        if self._shared is None:
            others = self._desired.unloaded - {name}
            self._desired = DesiredState(unloaded=others | {name} if unloaded else others)
            await self._refresh()
            return
        try:
            number = await asyncio.to_thread(_write_change, self._shared, name, unloaded)
        except OSError as error:
            got = f"what cannot be written ({error.strerror})"
            raise Unavailable("change", got, "one that the workers can be told; try again later") from error
        await self._reconcile()
        deadline = asyncio.get_running_loop().time() + FOLLOW_TIMEOUT_SECONDS
        while behind := _behind(self._shared, number):
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable("workers", f"{len(behind)} that did not follow", "a change that all have followed")
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _reconcile(self) -> None:
        """Apply a changed desired state, and record its number."""
        assert self._shared is not None
        desired, own = _read(self._shared), self._shared / f"{os.getpid()}.followed"
        if desired.number == self._desired.number and own.exists():
            return
        self._desired = desired
        try:
            await self._refresh()
        finally:
            own.write_text(str(desired.number))

    async def _refresh(self) -> list[VersionState]:
        async with self._refresh_lock:
            with _hide_repository_path():
                changes = await asyncio.to_thread(self._repository.refresh, self._desired.unloaded)
            for change in changes:
                level = logging.WARNING if change.reason else logging.INFO
                LOG.log(level, "model %s version %d: %s %s", change.name, change.version, change.state, change.reason)
            return changes


@contextmanager
def _log_failed_poll() -> Iterator[None]:
    """Look again later, where nothing could be read or said now: for want of descriptors, or of room on a disk."""
    try:
        yield
    except ArtifactError:
        pass  # it is logged, and nothing has changed
    except OSError as error:
        LOG.warning("the repository cannot be followed now: %s", error)


@contextmanager
def _hide_repository_path() -> Iterator[None]:
    """Log the path of a folder that cannot be followed; the caller's error does not name it."""
    try:
        yield
    except ArtifactError as error:
        LOG.warning("the repository cannot be followed: %s", error)
        raise ArtifactError("repository", "what cannot be read; the log says why", "a folder with models") from error


def _read(shared: Path) -> DesiredState:
    try:
        return DesiredState.model_validate_json((shared / "desired.json").read_bytes())
    except FileNotFoundError:
        return DesiredState()


def _write_change(shared: Path, name: str, unloaded: bool) -> int:
    """Write that a model shall be loaded or unloaded, and return the number of the change."""
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _read(shared)
        names = before.unloaded - {name} | ({name} if unloaded else set())
        draft = shared / "desired.json.tmp"
        draft.write_text(json.dumps({"number": before.number + 1, "unloaded": sorted(names)}))
        draft.replace(shared / "desired.json")
        return before.number + 1


def _behind(shared: Path, number: int) -> list[int]:
    """Return the living workers that have not applied the change of a number."""
    workers = {int(file.stem): file for file in shared.glob("*.followed")}
    return [
        pid for pid, file in workers.items() if Path(f"/proc/{pid}").exists() and int(file.read_text() or 0) < number
    ]
