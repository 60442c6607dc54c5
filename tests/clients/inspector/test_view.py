"""The look of the inspector: its width, colours, accessibility and use by keyboard, and what a screenshot shows."""

from itertools import combinations

import pytest

from tests.clients.browser import CHROMIUM, Page
from tests.clients.inspector.controls import PANELS, check_accessibility, choose, press, submit
from tests.clients.inspector.screenshots import count_colours, rectangles, take_screenshot
from tests.support.paths import ROOT
from tools.pictures import MAX_BYTES, draw_inspector

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_page_is_accessible_in_every_width_and_color_scheme(width: int, scheme: str, page: Page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    choose(page, "bert")
    submit(page, "embed")
    submit(page, "open")
    submit(page, "neighbours")
    page.wait_for("!document.getElementById('embed-result').hidden && !document.getElementById('stream').hidden")
    page.wait_for("document.getElementById('nearest').children.length")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    check_accessibility(page)
    page.call("Emulation.clearDeviceMetricsOverride")


@pytest.mark.parametrize("width", [320, 1280])
def test_screenshots_show_every_panel_in_both_color_schemes(width: int, page: Page) -> None:
    choose(page, "bert")
    submit(page, "embed")
    submit(page, "neighbours")
    for name in ("embed-result", "positions-result"):
        page.wait_for(f"!document.getElementById('{name}').hidden")
    for name in ("nearest", "heatmap-words"):
        page.wait_for(f"document.getElementById('{name}').innerText")
    page.call("Emulation.setScrollbarsHidden", hidden=True)
    structures = []
    for scheme, colour, page_colour in (("light", (245, 247, 248), (255,) * 3), ("dark", (29, 35, 39), (20, 24, 27))):
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
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
        pictures = rectangles(page, "canvas")
        counts = [count_colours(pixels, picture) for picture in pictures]
        assert len(counts) == 3
        assert counts[0] >= 2  # the ruler; the others are heat maps
        assert min(counts[1:]) >= 4
        assert all(count_colours(pixels, panel) > 3 for panel in panels)
        structures.append(panels)
    assert structures[0] == structures[1]
    page.call("Emulation.clearDeviceMetricsOverride")


def test_wide_page_has_two_columns_and_navigation_stays(page: Page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    for model, panels in (("gpt", "#embed, #positions"), ("wordllama", "#embed, #neighbours")):
        choose(page, model)
        left, right = rectangles(page, panels)
        assert (left[1], left[2] < right[0]) == (right[1], True)
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        assert page.evaluate("scrollY > 0 && document.querySelector('.top').getBoundingClientRect().top === 0")
        page.evaluate("document.querySelector('nav a').click()")
        header, overview = rectangles(page, ".top, #overview")
        assert header[3] <= overview[1]
    page.call("Emulation.clearDeviceMetricsOverride")


def test_narrow_table_has_shade_until_its_end(page: Page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=320, height=800, deviceScaleFactor=1, mobile=False)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    page.call("Emulation.setScrollbarsHidden", hidden=True)
    place = "document.querySelector('#overview .scroll')"
    assert page.evaluate(f"{place}.scrollWidth > {place}.clientWidth")
    shades = []
    for scroll in ("0", "1e6"):
        page.evaluate(f"{place}.scrollLeft = {scroll}")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        pixels = take_screenshot(page)
        ((left, top, right, _),) = rectangles(page, "#overview .scroll")
        shades.append([int(pixels[top + 2, column].max()) < 240 for column in (left + 2, right - 3)])
    assert shades == [[False, True], [True, False]]
    page.call("Emulation.clearDeviceMetricsOverride")


def test_tab_key_reaches_every_control(page: Page) -> None:
    choose(page, "gpt")
    submit(page, "embed")
    submit(page, "open")
    page.wait_for("!document.getElementById('stream').hidden && !document.getElementById('embed-result').hidden")
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
            visible = "document.activeElement.matches(':focus-visible')"
            assert page.evaluate(visible)
    assert reached == controls


def test_picture_of_documents_stays_small() -> None:
    file, picture = draw_inspector()
    assert (picture[8:12], len(picture) <= MAX_BYTES) == (b"WEBP", True)
    assert f"(images/{file})" in (ROOT / "docs/tutorial.md").read_text()
