"""The pages that `python -m tools.reference` writes."""

import pytest

from tools.reference import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run `make reference`"
