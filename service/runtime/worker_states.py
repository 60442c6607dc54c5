"""The states of several workers, in a folder: they agree on changes of the models by its files.

`desired.json` has the versions of all workers, the loaded models, and a number. The number grows with every change.
A later worker opens the same versions. `<pid>.followed` has the last change applied by a worker: its number, and the
names of models to be opened later.
"""

import fcntl
from pathlib import Path

from pydantic import BaseModel

from preblock.service.artifacts.catalog import find_artifacts
from preblock.service.core.errors import Unavailable

Versions = frozenset[tuple[str, int]]
"""Names of models, and numbers of their versions."""


class DesiredState(BaseModel):
    """The desired state of all workers.

    Args:
        number: of changes.
        loaded: names of the models to serve; None: all.
        versions: of models, loaded or not; None: all in the folder.

    """

    number: int = 0
    loaded: frozenset[str] | None = None
    versions: Versions | None = None

    def change(self, name: str, unloaded: bool, versions: Versions | None = None) -> "DesiredState":
        """Return the next state, with other versions, and with the model `name` loaded or unloaded."""
        assert self.loaded is not None
        loaded = self.loaded - {name} if unloaded else self.loaded | {name}
        return DesiredState(number=self.number + 1, loaded=loaded, versions=versions)


FIRST_STATE = DesiredState()
"""State without a change, of every version in the folder."""


class AppliedState(BaseModel):
    """The number of the last change applied by a worker, and its models to be opened later: `Repository.lacking`."""

    number: int = 0
    lacking: frozenset[str] = frozenset()


def read_desired(shared: Path) -> DesiredState:
    """Return the desired state of all workers."""
    try:
        return DesiredState.model_validate_json((shared / "desired.json").read_bytes())
    except FileNotFoundError:
        return FIRST_STATE


def write_desired(shared: Path, desired: DesiredState) -> None:
    """Write the desired state of all workers."""
    draft = shared / "desired.json.tmp"
    draft.write_text(desired.model_dump_json())
    draft.replace(shared / "desired.json")


def write_change(shared: Path, root: Path, name: str, unloaded: bool) -> int:
    """Record the versions in `root`, and a model to be loaded or unloaded; return the number of the change.

    Raises:
        ArtifactError: `root` cannot be read, or has no artifact.
        Unavailable: the change cannot be written.

    """
    try:
        with (shared / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = read_desired(shared)
            found = find_artifacts(root, before.versions or ())
            versions = frozenset((model, version) for model, version, _ in found)
            desired = before.change(name, unloaded, versions)
            write_desired(shared, desired)
            return desired.number
    except OSError as error:
        message = f"the change of {name!r} could not be written for the workers: {error.strerror}; try again later"
        raise Unavailable("change", str(error.strerror), "a writable temporary folder", message=message) from error


def applied_file(shared: Path, pid: int) -> Path:
    """Return the file of the change applied by a worker."""
    return shared / f"{pid}.followed"


def forget_ended(shared: Path) -> None:
    """Remove the states of ended workers, before another process gets the id of one."""
    for file in shared.glob("*.followed"):
        if not Path(f"/proc/{file.stem}").exists():
            file.unlink(missing_ok=True)


def behind(shared: Path, number: int) -> list[int]:
    """Return the ids of running workers without the change of a number."""
    return [pid for pid, state in applied(shared).items() if state.number < number]


def applied(shared: Path) -> dict[int, AppliedState]:
    """Return the state of each running worker by its id."""
    files = {int(file.stem): file for file in shared.glob("*.followed")}
    return {
        pid: AppliedState.model_validate_json(file.read_bytes() or b"{}")
        for pid, file in files.items()
        if Path(f"/proc/{pid}").exists()
    }
