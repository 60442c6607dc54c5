"""`preblock plot`: files with the same bytes on every run, and refusals."""

from pathlib import Path

import pytest

from preblock import plots
from preblock.plots.figures import KINDS
from tests.cli.command_line import failing, printed
from tests.support import commands
from tests.support.artifacts import make_repository


@pytest.fixture(scope="module")
def plotted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model for every kind of picture."""
    root = tmp_path_factory.mktemp("plotted")
    return make_repository(root, gpt="gpt", t5="t5", vit="vit")


@pytest.mark.parametrize(
    ("model", "kind", "suffix"),
    [
        ("gpt@1", "pca", "svg"),
        ("t5", "bias", "svg"),
        ("vit", "parameters", "png"),
    ],
)
def test_plot_bytes_match_in_process_drawing(model: str, kind: str, suffix: str, plotted: Path, tmp_path: Path) -> None:
    file = tmp_path / f"a.{suffix}"
    assert printed("plot", model, kind, "-o", file, "--repository", plotted) == f"wrote {file}\n"
    here = tmp_path / f"b.{suffix}"
    plots.save(KINDS[kind].draw(plots.read_artifact(plotted / model.partition("@")[0] / "1")), here)
    assert file.read_bytes() == here.read_bytes()
    assert file.read_bytes().startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_plot_of_preset_outside_repository_works(plotted: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    printed("plot", "gpt2-small", "parameters", "-o", file, "--repository", plotted)
    assert file.read_bytes().startswith(b"<?xml")


def test_plot_rejects_what_it_cannot_draw_or_write(plotted: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    for arguments, code, message in (
        (["gpt", "bias", "-o", file], 1, "gpt has no attention bias by distance; expected heatmap, similarity, pca, "),
        (["vit", "pca", "-o", file], 1, "vit has no known token vectors; expected parameters"),
        (["gpt", "histogram", "-o", file], 2, "'KIND': 'histogram' is not one of"),
        (["gpt", "pca", "-o", "a.pdf"], 2, "--output: got a.pdf, expected a name that ends in .svg or .png"),
        (["gpt", "pca", "-o", tmp_path / "none/a.svg"], 2, "expected a file in an existing folder"),
        (["gpt", "pca"], 2, "Missing option '-o'"),
    ):
        assert message in failing("plot", *arguments, "--repository", plotted, code=code)
    assert not list(tmp_path.iterdir())


def test_plot_on_full_disk_leaves_earlier_picture(plotted: Path, tmp_path: Path) -> None:
    """A limit on the size of files has the effect of a full disk."""
    picture = tmp_path / "pictures" / "positions.png"
    picture.parent.mkdir()
    picture.write_bytes(b"earlier")
    arguments = ("plot", "gpt", "heatmap", "--repository", plotted, "-o", picture)
    done = commands.run(commands.preblock, *arguments, room=512)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [f"preblock: {picture}: file too large"]
    assert [file.name for file in picture.parent.iterdir()] == ["positions.png"]
    assert picture.read_bytes() == b"earlier"
