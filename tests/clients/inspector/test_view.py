"""The look of the inspector: its width, colours, accessibility and use by keyboard."""

from typing import Any

import pytest

from tests.clients.browser import CHROMIUM, Page
from tests.clients.inspector.controls import (
    check_accessibility,
    choose,
    embed,
    press,
    resize,
    submit,
    wait_for_text,
    wait_for_view,
)
from tests.support.paths import ROOT
from tools.pictures import MAX_BYTES, draw_inspector

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_page_is_accessible_in_every_width_and_color_scheme(width: int, scheme: str, page: Page) -> None:
    resize(page, width, scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 27)"}[scheme]
    choose(page, "bert")
    embed(page)
    submit(page, "neighbours")
    wait_for_text(page, "nearest")
    wait_for_text(page, "heatmap-words")
    submit(page, "open")
    wait_for_view(page, "stream")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    check_accessibility(page)


def rectangles(page: Page, selector: str) -> Any:
    """Return left, top, right and bottom of elements in the window."""
    return page.evaluate(f"""Array.from(document.querySelectorAll({selector!r}), (element) => {{
        const {{left, top, right, bottom}} = element.getBoundingClientRect();
        return [left, top, right, bottom]; }})""")


def test_wide_page_has_two_columns_and_navigation_stays(page: Page) -> None:
    resize(page, 1280)
    for model, panels in (("gpt", "#embed, #positions"), ("wordllama", "#embed, #neighbours")):
        choose(page, model)
        left, right = rectangles(page, panels)
        assert (left[1], left[2] < right[0]) == (right[1], True)
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        assert page.evaluate("scrollY > 0 && document.querySelector('.top').getBoundingClientRect().top === 0")
        page.evaluate("document.querySelector('nav a').click()")
        header, overview = rectangles(page, ".top, #overview")
        assert header[3] <= overview[1]


def test_tab_key_reaches_every_control(page: Page) -> None:
    choose(page, "gpt")
    embed(page)
    submit(page, "open")
    wait_for_view(page, "stream")
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    controls = set(
        page.evaluate("""Array.from(document.querySelectorAll(
            "select, textarea, button, input:not([type=radio])"), (control) => control)
            .filter((control) => control.checkVisibility()).map((control, place) => control.dataset.place = place)""")
    )
    reached = set()
    for _ in range(2 * len(controls) + 40):
        press(page, "Tab", 9)
        place = page.evaluate("document.activeElement.dataset.place ?? null")
        if place is not None:
            reached.add(int(place))
            assert page.evaluate("document.activeElement.matches(':focus-visible')")
    assert reached == controls


def test_picture_of_documents_stays_small() -> None:
    file, picture = draw_inspector()
    assert (picture[8:12], len(picture) <= MAX_BYTES) == (b"WEBP", True)
    assert f"(images/{file})" in (ROOT / "docs/tutorial.md").read_text()
