"""Draws inputs for a parser, most of them near one that it takes."""

import sys
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

import tests.support.profiles  # noqa: F401
from tests.reliability.parsers import Parser, parsers

NUMBERS = [
    number.to_bytes(size, "little", signed=True)
    for size in (1, 2, 4, 8)
    for number in (-(2 ** (8 * size - 1)), -1, 0, 1, 2 ** (8 * size - 1) - 1)
]


@st.composite
def changed(draw: st.DrawFn, parser: Parser) -> bytes:
    """Draw an input that was taken, with some of it replaced, taken out, repeated or cut."""
    data = draw(st.sampled_from(parser.seeds))
    piece = st.sampled_from([*NUMBERS, *parser.words]) | st.binary(max_size=12)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(begin + draw(st.sampled_from([0, 1, 2, 8, 100])), len(data))))
        new = draw(piece | st.just(data[begin:end] * 2) | st.just(b""))
        data = data[:begin] + new + data[end:]
    return data


def hold(parser: Parser) -> None:
    """Hold a parser to as many inputs as the profile of hypothesis says."""

    @given(data=changed(parser) | st.binary(max_size=200))
    @example(data=b"")
    def each(data: bytes) -> None:
        parser.hold(data)

    each()


def main() -> None:
    """Hold one parser, by name, in a process of its own: name, folder, number of inputs."""
    name, folder, count = sys.argv[1:]
    settings.register_profile("alone", max_examples=int(count), deadline=None, database=None, derandomize=True)
    settings.load_profile("alone")
    parser = parsers(Path(folder))[name]
    for seed in parser.seeds:
        parser.read(seed)
    hold(parser)


if __name__ == "__main__":
    main()
