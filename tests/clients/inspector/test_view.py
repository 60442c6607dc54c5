"""The look of the inspector: its width, colours, accessibility and use by keyboard, and what a screenshot shows."""

from itertools import combinations

import pytest

from tests.clients.browser import CHROMIUM, Page
from tests.clients.inspector.controls import (
    PANELS,
    check_accessibility,
    choose,
    draw,
    embed,
    press,
    resize,
    submit,
    wait_for_text,
    wait_for_view,
)
from tests.clients.inspector.screenshots import count_colours, rectangles, take_screenshot
from tests.support.paths import ROOT
from tools.pictures import MAX_BYTES, draw_inspector

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


def use_panels(page: Page) -> None:
    choose(page, "bert")
    embed(page)
    submit(page, "neighbours")
    wait_for_text(page, "nearest")
    wait_for_text(page, "heatmap-words")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_page_is_accessible_in_every_width_and_color_scheme(width: int, scheme: str, page: Page) -> None:
    resize(page, width, scheme)
    use_panels(page)
    submit(page, "open")
    wait_for_view(page, "stream")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    check_accessibility(page)


@pytest.mark.parametrize("width", [320, 1280])
def test_screenshots_show_every_panel_in_both_color_schemes(width: int, page: Page) -> None:
    use_panels(page)
    structures = []
    for scheme, colour, page_colour in (("light", (245, 247, 248), (255,) * 3), ("dark", (29, 35, 39), (20, 24, 27))):
        resize(page, width, scheme)
        pixels = take_screenshot(page)
        assert pixels.shape[1] == width
        panels = rectangles(page, "main section")
        assert len(panels) == len(PANELS)
        for left, top, right, bottom in panels:  # the padding is the panel's, and beyond the border lies the page
            assert count_colours(pixels, (left + 4, top + 4, left + 6, bottom - 4)) == 1
            assert tuple(pixels[top + 4, left + 4]) == colour
            assert tuple(pixels[bottom + 4, (left + right) // 2]) == page_colour
        for one, other in combinations(panels, 2):
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        ruler, *maps = (count_colours(pixels, picture) for picture in rectangles(page, "canvas"))
        assert (len(maps), ruler >= 2, min(maps) >= 4) == (2, True, True)
        assert all(count_colours(pixels, panel) > 3 for panel in panels)
        structures.append(panels)
    assert structures[0] == structures[1]


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


def test_narrow_table_has_shade_until_its_end(page: Page) -> None:
    resize(page, 320)
    place = "document.querySelector('#overview .scroll')"
    assert page.evaluate(f"{place}.scrollWidth > {place}.clientWidth")
    shades = []
    for scroll in ("0", "1e6"):
        page.evaluate(f"{place}.scrollLeft = {scroll}")
        draw(page)
        pixels = take_screenshot(page)
        ((left, top, right, _),) = rectangles(page, "#overview .scroll")
        shades.append([int(pixels[top + 2, column].max()) < 240 for column in (left + 2, right - 3)])
    assert shades == [[False, True], [True, False]]


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
