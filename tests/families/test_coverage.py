"""A sample of `docs/reference/coverage.md`."""

import random
import re

import pytest

from preblock.export.discovery.library import library_version
from tests.families.coverage import DOCUMENT, cover

DOCUMENTED = DOCUMENT.read_text(encoding="utf-8")


def test_coverage_document_states_version_and_exact_share() -> None:
    assert library_version() in DOCUMENTED
    assert "## Wrong" not in DOCUMENTED
    share = re.search(r"are exact \((\d+\.\d) %\)", DOCUMENTED)
    assert share is not None
    assert float(share[1]) >= 95


@pytest.mark.parametrize("place", range(4))
def test_sampled_documented_types_are_discovered(place: int) -> None:
    discovered = re.findall(
        r"^\| `([\w.-]+)` \|.*whole model \|$", DOCUMENTED.partition("## Discovered")[2], re.MULTILINE
    )
    model_type = random.Random(library_version()).sample(sorted(discovered), 4)[place]
    assert [one.result for one in cover(model_type)] == ["discovered"]
