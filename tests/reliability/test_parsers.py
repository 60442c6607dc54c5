"""Bytes that nobody foresaw, for everything that reads bytes: an error of ours comes out, or a result, and nothing else.

`make reliability` draws a thousand times as many, and lets atheris look for those that lead to new lines.
"""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.reliability.parsers import Parser, parsers

NAMES = ("v2", "json", "frames", "npy", "raw", "safetensors", "protobuf", "manifest", "graphs")
NUMBERS = [
    number.to_bytes(size, "little", signed=True)
    for size in (1, 2, 4, 8)
    for number in (-(2 ** (8 * size - 1)), -1, 0, 1, 2 ** (8 * size - 1) - 1)
]


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parser]:
    return parsers(tmp_path_factory.mktemp("parsers"))


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


@pytest.mark.parametrize("name", NAMES)
def test_only_our_errors_come_out_and_memory_is_bounded(every: dict[str, Parser], name: str) -> None:
    parser = every[name]

    @given(data=changed(parser) | st.binary(max_size=200))
    @example(data=b"")
    def hold(data: bytes) -> None:
        parser.hold(data)

    hold()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_changed_was_taken(every: dict[str, Parser], name: str) -> None:
    for seed in every[name].seeds:
        try:
            every[name].read(seed)
        except Exception as error:
            pytest.fail(f"{seed!r}: {error}")


def test_every_parser_is_held(every: dict[str, Parser]) -> None:
    assert tuple(every) == NAMES


def test_another_error_and_too_much_memory_are_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        Parser(lambda data: 1 // len(data), ()).hold(b"")
    with pytest.raises(MemoryError, match=r"bytes for an input of 1$"):
        Parser(lambda data: bytes(2**23 * len(data)), ()).hold(b"x")
