"""How much is done: a little in the default run, and all of it with `make reliability`."""

import pytest

from tests.reliability.wires import IDS
from tests.support.artifacts import Floats


@pytest.fixture(scope="session")
def expected(tables: dict[str, Floats]) -> bytes:
    """Return the answer to the good request, from the raw tables."""
    return (tables["tokens"][IDS] + tables["positions"][[2, 3, 4]]).tobytes()


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether everything is to be done."""
    return bool(request.config.getoption("--hypothesis-profile") == "reliability")
