"""What all processes of one run share: values and folders made once, and servers started once."""

import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from tests.support.paths import ROOT
from tests.support.servers import Server, address_in, asgi_command, is_ready, serve_command
from tests.support.waiting import wait_until

Value = TypeVar("Value")
_LIFELINE, _MADE = "lifeline", ".made"
# Run a command in the background, and end it with standard input: with the run, whatever ends that.
_KEEPER = """
folder=$1; shift; exec 3<&0 0</dev/null
{ "$@" 3<&- & echo $! >"$folder/pid"; read _ <&3; kill $!; wait $!; echo $? >"$folder/status"; } &
"""


class Shared:
    """A folder of one run. Each process makes its own object; one lock for each name orders them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def value(self, name: str, compute: Callable[[], Value]) -> Value:
        """Return the value that the first caller with this name computed; it can be pickled."""
        return self._once(name, _recipe(compute), compute)

    def build(self, name: str, fill: Callable[[Path], Value]) -> Value:
        """Return the value that the first caller with this name returned, such as an export into a new folder.

        Tests read the folder, or copy it.
        """
        return self._once(name, _recipe(fill), lambda: fill(self._empty(name)))

    def make(self, name: str, fill: Callable[[Path], object]) -> Path:
        """Return the folder that the first caller with this name filled. Tests read it, or copy it."""

        def compute() -> Path:
            folder = self._empty(name)
            fill(folder)
            return folder

        return self._once(name, _recipe(fill), compute)

    def _once(self, name: str, recipe: str, compute: Callable[[], Value]) -> Value:
        file = self._path(name, _MADE)
        with self._lock(name):
            if not file.exists():
                draft = file.with_suffix(".draft")
                draft.write_bytes(pickle.dumps((recipe, compute())))
                draft.rename(file)
            found: tuple[str, Value] = pickle.loads(file.read_bytes())
        assert found[0] == recipe, f"{name}: made by {found[0]} and by {recipe}"
        return found[1]

    def server(self, name: str, repository: Path, *options: str, **environment: str) -> Server:
        """Return `preblock serve` of the first caller with this name. No test changes or exactly counts its state."""
        command, grpc = serve_command(repository, *options)
        name = f"server {name}"
        return self._once(name, str(options), lambda: self._serve(name, command, environment, "", grpc))

    def asgi_server(self, name: str, asgi: str, repository: Path, **environment: str) -> Server:
        """Return the server of ASGI_SERVERS of the first caller with this name."""
        command, address = asgi_command(asgi)
        environment["PREBLOCK_REPOSITORY"] = str(repository)
        name = f"server {name}"
        return self._once(name, asgi, lambda: self._serve(name, command, environment, address, ""))

    def _serve(self, name: str, command: list[str], environment: Mapping[str, str], address: str, grpc: str) -> Server:
        """Start a server that tells its address by its banner, unless `address` is known."""
        folder = self._empty(name)
        lifeline = os.open(self.folder / _LIFELINE, os.O_RDONLY | os.O_NONBLOCK)  # opens also after the run's end
        os.set_blocking(lifeline, True)
        with (folder / "banner").open("w") as output, (folder / "errors").open("w") as errors:
            subprocess.run(
                ["sh", "-c", _KEEPER, "keeper", str(folder), *command],
                stdin=lifeline,
                stdout=output,
                stderr=errors,
                cwd=ROOT,
                env=os.environ | environment,
                start_new_session=True,  # an interrupt from the terminal ends the run first
                check=True,
            )
        os.close(lifeline)

        def started() -> bool:
            assert _runs(folder), (folder / "errors").read_text()
            return is_ready(address) if address else bool(address_in((folder / "banner").read_text()))

        wait_until(started, 60)
        banner, pid = (folder / "banner").read_text(), int((folder / "pid").read_text())
        return Server(address or address_in(banner), grpc, pid, banner)

    def _empty(self, name: str) -> Path:
        folder = self._path(name)
        shutil.rmtree(folder, ignore_errors=True)  # what a failed attempt left
        folder.mkdir()
        return folder

    def _path(self, name: str, suffix: str = "") -> Path:
        return self.folder / (quote(name, safe=" ") + suffix)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        with self._path(name, ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextmanager
def sharing() -> Iterator[tuple[Shared, list[str]]]:
    """Make the folder of a run. At the end, stop its servers and add the faults that they wrote to the list."""
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="preblock-tests-", ignore_cleanup_errors=True) as folder:
        os.mkfifo(Path(folder) / _LIFELINE)
        lifeline = os.open(Path(folder) / _LIFELINE, os.O_RDWR)
        try:
            yield Shared(Path(folder)), faults
        finally:
            os.close(lifeline)
            faults += [fault for pid in Path(folder).glob("server */pid") if (fault := _fault(pid.parent))]
            faults += [fault for made in Path(folder).glob(f"*{_MADE}") for fault in _changes(made)]


def _fault(folder: Path) -> str:
    """Wait for the end of a server, and return what it did wrong."""
    try:
        wait_until(lambda: not _runs(folder), 60)
        status = (folder / "status").read_text().strip()
    except AssertionError:
        with suppress(ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        status = "none within 60 s of SIGTERM"
    written = (folder / "errors").read_text()
    # Others than `preblock serve`, which has a banner, may end by the signal.
    expected = ("0",) if address_in((folder / "banner").read_text()) else ("0", "143")
    return "" if status in expected and "Traceback" not in written else f"{folder.name}: status {status}\n{written}"


def _recipe(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _changes(made: Path) -> Iterator[str]:
    """Yield what tests changed in a folder after it was made."""
    if not made.name.startswith("server "):
        for file in made.with_suffix("").rglob("*"):
            if file.lstat().st_mtime_ns > made.stat().st_mtime_ns:
                yield f"a test changed {file.relative_to(made.parent)}; it was made for all tests"


def _runs(folder: Path) -> bool:
    status = folder / "status"
    return not (status.exists() and status.read_text())
