"""Soak test: random requests of many clients over every protocol, with a check of every bit and of memory.

    python -m benchmarks.soak                      # a million answers of gpt2-small in model_repository
    python -m benchmarks.soak --steps 100000 --seed 7
    python -m benchmarks.soak --minutes 30

Linux only. Starts a server. Proxies between it and the clients cut each connection after a random number of bytes, in a
handshake, a message or an answer. Streams then resume at their last offsets over a new connection. They rewind,
reorder, add and drop rows, and repeat messages. Requests have random shapes and formats, are sometimes compressed, and
sometimes part of a sequence; some have streamed responses. Malformed and invalid requests must be rejected without an
effect. The expected vectors are sums of table rows by numpy, so the artifact must have tokens and learned positions
only.

Exits with 1 after a wrong bit, an answer slower than 60 seconds, a stream left open, a warning of the server, or a
failed shutdown. It also fails if the least anonymous memory of the server grows by more than 16 MiB from the third
quarter of the run to the fourth. Peak memory is not checked: it depends on the number of large messages in flight, and
on freed memory kept by the C library.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.soak.common import PATIENCE, Soak, SoakFailure, Truth
from benchmarks.soak.run import SoakTarget, run
from tests.support.servers import free_port


def main() -> None:
    """Serve, run the soak test, and print the totals."""
    parser = argparse.ArgumentParser(description="Send random requests over every protocol, and check every bit.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=int, default=1_000_000, help="number of correct answers, all protocols (default: 1000000)"
    )
    length.add_argument("--minutes", type=float, default=0.0, help="duration, in place of --steps")
    parser.add_argument("--clients", type=int, default=4, help="clients of each protocol (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: 0)")
    parser.add_argument("--growth", type=float, default=16.0, help="allowed growth of memory in MiB (default: 16)")
    parser.add_argument(
        "--repository",
        type=Path,
        default=Path("model_repository"),
        help="folder of the models (default: model_repository)",
    )
    parser.add_argument(
        "--model", default="gpt2-small", help="a model of tokens and learned positions (default: gpt2-small)"
    )
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
            raise SystemExit(f"the server exited with {ended} and logged {len(said.splitlines())} warnings")


if __name__ == "__main__":
    main()
