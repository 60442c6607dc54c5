"""How much is done: a little in the default run, and all of it with `make reliability`."""

import pytest

from tests.reliability.wires import IDS
from tests.support.artifacts import Floats


@pytest.fixture(scope="session")
def good_answer(tiny_tables: dict[str, Floats]) -> bytes:
    """Return the answer to the good request, from the raw tables."""
    return (tiny_tables["tokens"][IDS] + tiny_tables["positions"][[2, 3, 4]]).tobytes()


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether everything is to be done."""
    return bool(request.config.getoption("--hypothesis-profile") == "reliability")
