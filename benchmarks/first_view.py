"""Time until a browser shows the inspector, against a bare file of the same server: its style sheet as text.

    python -m benchmarks.first_view [--rounds N]

Chromium opens both in turn, with an empty cache. `load` is the end of the load event; `model` is the time until
the page shows the first model, after three requests in a row: the page, the list, and the model. Figures are medians.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.clients.browser import Page, browsing
from tests.support.paths import ROOT
from tests.support.servers import serve

LOADED = """new Promise((resolve) => {
    const look = () => {
        const [{loadEventEnd}] = performance.getEntriesByType("navigation");
        if (loadEventEnd) resolve(loadEventEnd);
        else setTimeout(look, 1);
    };
    look();
})"""
SHOWN = """new Promise((resolve) => {
    const look = () => document.getElementById("facts")?.children.length
        ? resolve(performance.now()) : requestAnimationFrame(look);
    look();
})"""


def measure(page: Page, address: str, scripts: tuple[str, ...]) -> list[float]:
    """Open `address` with an empty cache, and return the milliseconds that each script gives."""
    page.call("Page.navigate", url="about:blank")
    page.wait_for("location.href === 'about:blank'")
    page.call("Network.clearBrowserCache")
    page.call("Page.navigate", url=address)
    page.wait_for(f"location.href === '{address}'")
    return [float(page.evaluate(script)) for script in scripts]


def main() -> None:
    """Print milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with (
        tempfile.TemporaryDirectory() as profile,
        serve(ROOT / "model_repository") as server,
        browsing("about:blank", Path(profile)) as page,
    ):
        page.call("Page.enable")
        page.call("Network.enable")
        bare: list[list[float]] = []
        shown: list[list[float]] = []
        for _ in range(rounds + 1):  # the first round warms up
            bare.append(measure(page, f"{server.address}/inspect/style.css", (LOADED,)))
            shown.append(measure(page, f"{server.address}/inspect", (LOADED, SHOWN)))
    (floor,) = map(statistics.median, zip(*bare[1:], strict=True))
    load, model = map(statistics.median, zip(*shown[1:], strict=True))
    print(f"bare file: load {floor:.0f} ms")
    for name, found in (("load", load), ("model", model)):
        print(f"inspector: {name} {found:.0f} ms, {found / floor:.2f} times the bare file")


if __name__ == "__main__":
    main()
