"""Discovery against the family table, and a sample of `docs/coverage.md`."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from preblock.export.discovery.discovery import discover
from preblock.export.discovery.library import library_version
from preblock.models.checkpoints.families import FAMILIES
from preblock.models.checkpoints.reader import read_frontend
from tests.families.coverage import cover
from tests.families.coverage_page import DOCUMENT
from tests.families.library_models import STREAMS, save

# The scale of an ESM depends on its mask tokens; tiny models of Funnel do not run whole; others take several streams,
# or inputs of each layer.
NOT_DISCOVERED = {
    "esm",
    "funnel",
    *STREAMS,
    *(f"gemma{ending}" for ending in ("3n/text", "3n_text", "4/text", "4_text")),
}
DOCUMENTED = DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NOT_DISCOVERED))
def test_discovery_matches_family_table(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    side = name.partition("/")[2] or None
    row = read_frontend(tmp_path, side).eval()
    found = discover(tmp_path, json.loads((tmp_path / "config.json").read_text()), side).frontend
    assert [step.kind for step in found.config.steps] == [step.kind for step in row.config.steps]
    assert found.config.counts == row.config.counts
    if found.config.consumer_scales is not None:  # None if the library does not run on `inputs_embeds` alone
        given = found.config.lookup, found.config.consumer_scales
        assert given == (row.config.lookup, row.config.consumer_scales)
    ids = torch.arange(3, 11).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(found(ids), row(ids))


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
