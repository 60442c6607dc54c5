"""The fixture of folders whose tests export: torch reads its own tables once."""

from collections.abc import Iterator

import pytest

from tests.support.torchlib import read_once


@pytest.fixture(scope="session", autouse=True)
def translations() -> Iterator[None]:
    """Read torch's tables once; the commands that a shell runs read them each time."""
    with pytest.MonkeyPatch.context() as patch:
        read_once(patch)
        yield
