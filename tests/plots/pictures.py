"""The pictures of the documentation: `python -m tests.plots.pictures` draws them again."""

from pathlib import Path

from preblock import models, plots
from tests.support.paths import ROOT

IMAGES = ROOT / "docs" / "images"


def draw_pictures(folder: Path) -> list[Path]:
    """Write every picture into `folder`, and return the files."""
    sinusoids = plots.read_module(models.SinusoidalPositionalEncoding(128, 256), "sinusoids")
    rotary = plots.read_module(models.RotaryEmbedding(models.RotaryConfig(dim=64)), "rotary")
    alibi = plots.read_module(models.AlibiBias(8), "ALiBi")
    drawn = {
        "sinusoids-heatmap.svg": plots.heatmap(sinusoids),
        "rotary-wavelengths.svg": plots.wavelengths(rotary),
        "alibi-bias.svg": plots.bias(alibi),
    }
    for name, figure in drawn.items():
        plots.save(figure, folder / name)
    return [folder / name for name in drawn]


if __name__ == "__main__":
    draw_pictures(IMAGES)
