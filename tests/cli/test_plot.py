"""`preblock plot`: files with the same bytes on every run, and refusals."""

from pathlib import Path

import pytest

from preblock import plots
from preblock.plots.figures import KINDS
from tests.cli.command_line import failing, run
from tests.support import commands
from tests.support.artifacts import make_repository


@pytest.fixture(scope="module")
def plotted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model for every kind of picture."""
    root = tmp_path_factory.mktemp("plotted")
    return make_repository(root, gpt="gpt", rotary="rotary", t5="t5", vit="vit")


@pytest.mark.parametrize(
    ("model", "kind", "suffix"),
    [
        ("gpt", "heatmap", "svg"),
        ("gpt", "similarity", "png"),
        ("gpt@1", "pca", "svg"),
        ("rotary", "wavelengths", "svg"),
        ("t5", "bias", "svg"),
        ("vit", "parameters", "png"),
    ],
)
def test_plot_bytes_match_in_process_drawing(model: str, kind: str, suffix: str, plotted: Path, tmp_path: Path) -> None:
    file = tmp_path / f"a.{suffix}"
    done = run("plot", model, kind, "-o", file, "--repository", plotted)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {file}\n", "")
    here = tmp_path / f"b.{suffix}"
    plots.save(KINDS[kind].draw(plots.read_artifact(plotted / model.partition("@")[0] / "1")), here)
    assert file.read_bytes() == here.read_bytes()
    assert file.read_bytes().startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_plot_of_preset_outside_repository_works(plotted: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    done = run("plot", "gpt2-small", "parameters", "-o", file, "--repository", plotted)
    assert (done.returncode, done.stderr) == (0, "")
    assert file.read_bytes().startswith(b"<?xml")


def test_plot_rejects_kind_unsupported_by_model(plotted: Path, tmp_path: Path) -> None:
    message = failing("plot", "gpt", "bias", "-o", tmp_path / "a.svg", "--repository", plotted, code=1)
    assert message == "gpt has no attention bias by distance; expected heatmap, similarity, pca, parameters"
    assert not (tmp_path / "a.svg").exists()


def test_plot_rejects_token_kinds_for_image_encoder(plotted: Path, tmp_path: Path) -> None:
    message = failing("plot", "vit", "pca", "-o", tmp_path / "a.svg", "--repository", plotted, code=1)
    assert message == "vit has no known token vectors; expected parameters"


def test_plot_rejects_unknown_model(plotted: Path, tmp_path: Path) -> None:
    message = failing("plot", "gpd", "pca", "-o", tmp_path / "a.svg", "--repository", plotted, code=1)
    assert message.endswith("has no model 'gpd'; did you mean gpt?")


def test_plot_rejects_unknown_kind_and_file_format(plotted: Path, tmp_path: Path) -> None:
    assert "'KIND': 'histogram' is not one of" in failing("plot", "gpt", "histogram", "-o", tmp_path / "a.svg", code=2)
    assert failing("plot", "gpt", "pca", "-o", "a.pdf", "--repository", plotted, code=2) == (
        "--output: got a.pdf, expected a name that ends in .svg or .png"
    )
    assert "Missing option '-o'" in failing("plot", "gpt", "pca", code=2)


def test_plot_into_missing_folder_is_rejected(plotted: Path, tmp_path: Path) -> None:
    file = tmp_path / "none" / "a.svg"
    message = failing("plot", "gpt", "heatmap", "-o", file, "--repository", plotted, code=2)
    assert message.startswith(f"--output: got {str(file)[:20]}")
    assert message.endswith("expected a file in an existing folder")


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
