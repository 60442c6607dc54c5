"""The pictures of the documentation are those of the code."""

from pathlib import Path

from tests.plots.pictures import IMAGES, draw_pictures
from tests.support.paths import ROOT


def test_documentation_pictures_are_current(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "front-ends.md").read_text()
    for file in draw_pictures(tmp_path):
        assert file.read_bytes() == (IMAGES / file.name).read_bytes(), "python -m tests.plots.pictures draws them again"
        assert f"(images/{file.name})" in page
