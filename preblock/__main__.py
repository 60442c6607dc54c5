"""The command line: `preblock`, or `python -m preblock`."""

import gc
import sys


def main() -> None:
    """Run the command line."""
    if "serve" in sys.argv[1:3]:
        gc.disable()  # until the service runs: collections during the imports take a seventh of the start
    from preblock.cli import main as run

    run()


if __name__ == "__main__":
    main()
