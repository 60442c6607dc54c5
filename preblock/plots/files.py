"""Writes figures to files: the same figure gives the same bytes."""

from io import BytesIO
from pathlib import Path
from secrets import token_hex

from matplotlib import style
from matplotlib.figure import Figure

from preblock.service.core.errors import Invalid

FORMATS = (".svg", ".png")
SVG_SALT = "preblock"
"""Seed of the identifiers in an SVG, which matplotlib draws at random without one."""
PNG_DOTS_PER_INCH = 150


def save(figure: Figure, file: str | Path) -> None:
    """Write `figure` into `file`, as SVG or PNG by its suffix, without a date. An error leaves an earlier file.

    Raises:
        Invalid: as `check_place`.
        OSError: the file cannot be written.

    """
    place = Path(file)
    check_place(place)
    svg = place.suffix == ".svg"
    picture, metadata = BytesIO(), {"Date": None} if svg else {"Software": None}
    with style.context(["default", {"svg.hashsalt": SVG_SALT}]):
        figure.savefig(picture, format=place.suffix[1:], dpi="figure" if svg else PNG_DOTS_PER_INCH, metadata=metadata)
    draft = place.with_name(f".{place.name}.{token_hex(3)}")
    try:
        draft.write_bytes(picture.getvalue())
        draft.replace(place)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def check_place(file: Path) -> None:
    """Raise Invalid unless the suffix of `file` is .svg or .png, and its folder exists."""
    if file.suffix not in FORMATS:
        raise Invalid("file", str(file), f"a name that ends in {' or '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise Invalid("file", str(file), "a file in an existing folder")
