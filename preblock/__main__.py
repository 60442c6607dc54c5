"""The command line: `preblock`, or `python -m preblock`."""

import gc
import sys

from preblock.service.core.copying import begin_again


def main() -> None:
    """Run the command line; a service in a process that copies fast."""
    if "serve" in sys.argv[1:3]:  # before anything is imported that would be imported twice
        begin_again()
        gc.disable()  # until it serves: looking for garbage among what is imported takes a seventh of the time
    from preblock.cli import main as run

    run()


if __name__ == "__main__":
    main()
