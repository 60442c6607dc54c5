"""The processes of a service with several workers, as proc(5) tells them."""

from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the children of a process's first thread."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def fork_servers(parent: int) -> list[int]:
    """Return the process of the workers' fork server; none before its start."""
    found = []
    for child in children(parent):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"multiprocessing.forkserver" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def workers(parent: int) -> list[int]:
    """Return the workers of a parent, also in their start."""
    return [worker for server in fork_servers(parent) for worker in children(server)]


def status_bytes(pid: int, field: str) -> int:
    """Return a size in `/proc/PID/status`, such as VmRSS, in bytes."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition(f"\n{field}:")[2].split()[0])


def alive(pid: int) -> bool:
    """Return whether a process runs, or waits."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
