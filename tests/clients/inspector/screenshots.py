"""Screenshots, and where the page has its elements."""

import base64
from io import BytesIO

import numpy as np
import numpy.typing as npt
from matplotlib.image import imread

from tests.clients.browser import Page

Pixels = npt.NDArray[np.uint8]
Rectangle = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; right and bottom lie outside."""


def take_screenshot(page: Page) -> Pixels:
    """Return the whole page as (height, width, 3), at one pixel of the screen for one of CSS."""
    taken = page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
    values = imread(BytesIO(base64.b64decode(taken["data"])), format="png")  # from 0 to 1
    pixels: Pixels = np.rint(values[:, :, :3] * 255).astype(np.uint8)
    return pixels


def rectangles(page: Page, selector: str) -> list[Rectangle]:
    """Return where the page has its elements, inside their borders, in pixels of a screenshot."""
    found = page.evaluate(f"""Array.from(document.querySelectorAll({selector!r}), (element) => {{
        const {{x, y}} = element.getBoundingClientRect();
        const [left, top] = [x + scrollX + element.clientLeft, y + scrollY + element.clientTop];
        return [left, top, left + element.clientWidth, top + element.clientHeight].map(Math.round); }})""")
    return [(left, top, right, bottom) for left, top, right, bottom in found]


def count_colours(pixels: Pixels, area: Rectangle) -> int:
    """Return the number of different colours in an area."""
    left, top, right, bottom = area
    return len(np.unique(pixels[top:bottom, left:right] @ np.array([1 << 16, 1 << 8, 1])))
