"""Holds connections, half of them with half a request, until it reads a line.

    python -m tests.reliability.held_connections

A process of its own takes neither descriptors nor time of another client.
"""

import socket
import sys
from contextlib import ExitStack

HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


def main() -> None:
    """Hold some, given host, port and number; say how many, and at the end how many of them are answered."""
    host, port, count = sys.argv[1:]
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(int(count))]
        for stream in held[1::2]:
            stream.sendall(HEAD)
        print(len(held), flush=True)  # noqa: T201 - output of a script
        sys.stdin.readline()
        for index, stream in enumerate(held):
            stream.sendall(b"\r\n" if index % 2 else HEAD + b"\r\n")
        print(sum(stream.recv(12) == b"HTTP/1.1 200" for stream in held))  # noqa: T201


if __name__ == "__main__":
    main()
