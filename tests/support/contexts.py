"""Plugin of pytest: coverage records which test runs each line, also in processes that the test starts.

A server of a shared fixture serves many tests, so its lines get the name of the fixture; fixtures.json lists its tests.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

VARIABLE = "TEST_CONTEXT"
"""Coverage reads the context of a new process from this environment variable."""


def _enter(context: str) -> None:
    os.environ[VARIABLE] = context
    measurement = coverage.Coverage.current()
    assert measurement is not None
    measurement.switch_context(context)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Name the test."""
    _enter(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """Name the fixture, if tests share it."""
    test = os.environ[VARIABLE]
    if fixturedef.scope != "function":
        _enter(fixturedef.argname)
    try:
        return (yield)
    finally:
        _enter(test)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the tests of every fixture beside the data of coverage, in one of the workers."""
    if session.items and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        users: defaultdict[str, list[str]] = defaultdict(list)
        for item in session.items:
            assert isinstance(item, pytest.Function)
            for name in item.fixturenames:
                users[name].append(item.nodeid)
        measurement = coverage.Coverage.current()
        assert measurement is not None
        place = Path(str(measurement.get_option("run:data_file"))).with_name("fixtures.json")
        place.write_text(json.dumps(users), encoding="utf-8")
