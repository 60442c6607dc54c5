"""The states of several workers, in the files of a folder through which they agree on changes of the models.

`desired.json` lists the unloaded models, with a number that grows with every change; `<pid>.followed` holds the last
change applied by a worker: its number, and its models to be opened later.
"""

import fcntl
from pathlib import Path

from pydantic import BaseModel


class DesiredState(BaseModel):
    """The desired state of all workers: every model of the folder, except `unloaded`."""

    number: int = 0
    unloaded: frozenset[str] = frozenset()

    def change(self, name: str, unloaded: bool) -> "DesiredState":
        """Return the next state, in which the model `name` is loaded or unloaded."""
        others = self.unloaded - {name}
        return DesiredState(number=self.number + 1, unloaded=others | {name} if unloaded else others)


class AppliedState(BaseModel):
    """The number of the last change applied by a worker, and its models to be opened later: `Repository.lacking`."""

    number: int = 0
    lacking: frozenset[str] = frozenset()


def read_desired(shared: Path) -> DesiredState:
    """Return the desired state of all workers."""
    try:
        return DesiredState.model_validate_json((shared / "desired.json").read_bytes())
    except FileNotFoundError:
        return DesiredState()


def write_change(shared: Path, name: str, unloaded: bool) -> int:
    """Record that a model shall be loaded or unloaded, and return the number of the change."""
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        desired = read_desired(shared).change(name, unloaded)
        draft = shared / "desired.json.tmp"
        draft.write_text(desired.model_dump_json())
        draft.replace(shared / "desired.json")
        return desired.number


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
