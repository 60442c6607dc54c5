"""The command line: `preblock`, or `python -m preblock`."""

import gc
import os
import sys
from importlib.util import find_spec

from preblock.extras import EXTRAS, find_missing, write_hint

CLIENT_ALONE = """preblock: only the Python client is installed. Install the commands:
  pip install 'preblock[cpu]'         serve on the CPU, and all commands but these
  pip install 'preblock[cpu,export]'  export, verify, convert, families
  pip install 'preblock[cpu,torch]'   exports of images, spectrograms and modules
  pip install 'preblock[cpu,plot]'    plot
  With an NVIDIA GPU, write gpu instead of cpu."""


def main() -> None:
    """Run the command line. Without the packages of the extra `service`, name the extra to install."""
    open_closed_streams()
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    if find_spec("click") is None or find_missing(["service"]):
        sys.exit(explain_install(command))
    if command == "serve":
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


def explain_install(command: str | None) -> str:
    """Return the message of an install without the service: the extras that `command` needs, or those of all."""
    if command not in EXTRAS:
        return CLIENT_ALONE
    hint = write_hint(EXTRAS[command])
    return f"preblock: only the Python client is installed. `preblock {command}` needs more: {hint}"


if __name__ == "__main__":
    main()
