"""The look of the inspector: its width, colours, accessibility and use by keyboard."""

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
