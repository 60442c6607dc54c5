"""The command line: `preblock`, or `python -m preblock`."""

import gc
import os
import sys
from importlib.util import find_spec

CLIENT_ALONE = """preblock: only the Python client is installed. Install the commands:
  pip install 'preblock[cpu]'         serve on the CPU, and all commands but these two
  pip install 'preblock[cpu,export]'  export and verify, too
  With an NVIDIA GPU, write gpu instead of cpu."""


def main() -> None:
    """Run the command line. Without the packages of the extra `service`, name the extra to install."""
    open_closed_streams()
    if find_spec("click") is None or find_spec("fastapi") is None:
        sys.exit(explain_install(*sys.argv[1:2]))
    if "serve" in sys.argv[1:3]:
        gc.disable()  # until the service runs: collections during the imports take a seventh of the start
    from preblock.cli import main as run

    run()


def open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream: a socket would get its number, and receive the log."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest free number, this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def explain_install(command: str = "--help") -> str:
    """Return the message of an install without the service: the extra that `command` needs, or all extras."""
    if command.startswith("-"):
        return CLIENT_ALONE
    extra = {"export": "cpu,export", "verify": "cpu,export", "plot": "cpu,plot"}.get(command, "cpu")
    return (
        f"preblock: only the Python client is installed. `preblock {command}` needs more: "
        f"pip install 'preblock[{extra}]' (gpu instead of cpu for an NVIDIA GPU)"
    )


if __name__ == "__main__":
    main()
