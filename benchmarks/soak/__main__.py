"""Many clients at every protocol, at random and broken at random: every bit is checked, memory must stay flat.

    python -m benchmarks.soak                      # a million answers of gpt2-small in model_repository
    python -m benchmarks.soak --steps 100000 --seed 7
    python -m benchmarks.soak --minutes 30

Linux only. Starts a server of its own. Between it and the clients stand proxies that cut each connection after a random
number of bytes, be it in a handshake, a message or an answer. A stream then goes on elsewhere at its last offsets; rows
are rewound, reordered, added and dropped, and messages are repeated. Requests have random shapes, some so large that
they are answered in pieces, and any of the forms of their protocol, now and then compressed; some are fed as a
sequence. Among all of them are some that are broken or not allowed: they must be refused, and change nothing. Vectors
are compared with the tables of the artifact, read and added by numpy; so it must be one of tokens and learned positions
alone. Exits with 1 where a bit is wrong, an answer takes longer than 60 seconds, a stream stays open, the least of the
server's own memory grows by more than 16 MiB from the third quarter to the fourth, or the server has a warning or does
not end well as it is told to. The most of its memory is up to chance: how many copies of a large message are there as
it is looked at, and how much of what was freed the C library keeps.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.servers import free_port
from benchmarks.soak.run import SoakTarget, run
from benchmarks.soak.shared import PATIENCE, Soak, SoakFailure, Truth


def main() -> None:
    """Serve, soak, and say what was seen."""
    parser = argparse.ArgumentParser(description="Ask and break off at every protocol, and check every bit.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=int, default=1_000_000, help="right answers of all protocols (default: 1000000)"
    )
    length.add_argument("--minutes", type=float, default=0.0, help="in place of them, how long it lasts")
    parser.add_argument("--clients", type=int, default=4, help="of each protocol (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument("--growth", type=float, default=16.0, help="MiB of memory that are allowed (default: 16)")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"), help="default: model_repository")
    parser.add_argument("--model", default="gpt2-small", help="of tokens and learned positions (default: gpt2-small)")
    given = parser.parse_args()
    truth = Truth(max((given.repository / given.model).glob("[1-9]*"), key=lambda folder: int(folder.name)))
    port = free_port()
    command = [str(Path(sys.executable).parent / "preblock"), "serve", "--repository", str(given.repository)]
    command += ["--port", "0", "--grpc-port", str(port), "--log-level", "warning"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            if found := next(filter(None, (re.search(r"http://(\S+)", line) for line in process.stdout)), None):
                server = SoakTarget(found[1], f"127.0.0.1:{port}", process.pid)
                soak = Soak(truth, given.model, given.steps, 60 * given.minutes)
                asyncio.run(run(soak, server, given.clients, given.seed, given.growth))
        except* SoakFailure as wrong:
            raise SystemExit("\n".join(map(str, wrong.exceptions))) from None
        finally:
            process.terminate()
            ended = process.wait(PATIENCE)
            log.seek(0)
            said = log.read()
            print(said, end="", file=sys.stderr)
        if said or ended:
            raise SystemExit(f"the server ended with {ended}, and had {len(said.splitlines())} lines to warn of")


if __name__ == "__main__":
    main()
