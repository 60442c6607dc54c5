"""How much is done: a little in the default run, and all of it with `make reliability`."""

import pytest


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether everything is to be done."""
    return bool(request.config.getoption("--hypothesis-profile") == "reliability")
