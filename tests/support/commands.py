"""Commands in processes of their own, forked after the import of torch: it takes seconds."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "preblock.cli",
        "preblock.plots",
        "preblock.export.exporter",
        "preblock.service.app",
        "onnxscript.function_libs.torch_lib.ops",
        "torch._dynamo",
        "torch.onnx._internal.exporter._core",
        "tests.support.preloaded",
    ]
)


@dataclass(frozen=True)
class RunningCommand:
    """A process, and the files of its standard output and standard error."""

    process: ForkServerProcess
    output: IO[str]
    errors: IO[str]

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and return output and exit code; negative after a signal."""
        self.process.join()
        assert self.process.exitcode is not None
        self.output.seek(0)
        self.errors.seek(0)
        return subprocess.CompletedProcess("", self.process.exitcode, self.output.read(), self.errors.read())


@contextmanager
def running(
    function: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str] = MappingProxyType({}),
    room: int | None = None,
) -> Iterator[RunningCommand]:
    """Run a function of this module in a process of its own, with further variables of the environment.

    It may write files of `room` bytes; default any. Another module than this would be imported before the environment
    is set.
    """
    with tempfile.NamedTemporaryFile("w+") as output, tempfile.NamedTemporaryFile("w+") as errors:
        process = _CONTEXT.Process(
            target=_begin, args=(function, arguments, room, {**os.environ, **environment}, output.name, errors.name)
        )
        process.start()
        try:
            yield RunningCommand(process, output, errors)
        finally:
            process.kill()
            process.join()
            process.close()


def run(
    function: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str] = MappingProxyType({}),
    room: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a function as `running` does, and wait for its end."""
    with running(function, *arguments, environment=environment, room=room) as started:
        return started.wait()


def preblock(*arguments: str | Path) -> None:
    """Be the command line."""
    from preblock.cli import main

    sys.argv = ["preblock", *map(str, arguments)]
    main()


def load(*sources: str) -> None:
    """Print the commit of every source."""
    from preblock.export.options import resolve
    from preblock.export.source import load_source

    for source in sources:
        print(load_source(resolve(source)).record.revision)  # noqa: T201


def download(name: str) -> None:
    """Print the folder of a hub's repository in the cache, as huggingface_hub downloads it."""
    from huggingface_hub import snapshot_download

    print(snapshot_download(name))  # noqa: T201


def _begin(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    room: int | None,
    environment: dict[str, str],
    output: str,
    errors: str,
) -> None:
    for number, file in enumerate((os.devnull, output, errors)):
        os.dup2(os.open(file, os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server may ignore it
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        function(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)  # coverage writes its file at the end of the process
