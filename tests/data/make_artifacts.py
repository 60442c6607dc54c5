"""Export the stored artifacts anew: `python -m tests.data.make_artifacts [NAME ...]`, all of them by default.

Run it after a change of the artifact format. A test exports them again and compares.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from preblock.export.exporter import export_loaded
from preblock.export.source import LoadedSource
from preblock.models.config import FrontEndConfig
from preblock.models.embeddings import BertEmbeddings, GPT2Embeddings
from preblock.models.frontend import FrontEnd
from preblock.models.modules.bias import AlibiConfig, BiasConfig, RelativeSinusoidConfig, T5Config
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.models.modules.stems import PatchConfig, PatchStem, Stem
from preblock.models.steps import Levels, Mask, Positions, Project, Scale, Segments, Step, Tokens
from preblock.service.artifacts.manifest import Source
from preblock.service.artifacts.names import DATA, PARITY
from tests.support.artifacts import STORED, WEIGHTS, draw_data, draw_tables
from tests.support.tokenizers import write_tokenizer

HUGE_VALUE = 1e6
"""Beyond the range of float16."""


@dataclass(frozen=True)
class Recipe:
    """A front-end, the seed of its tables, and the tokenizer beside it.

    Args:
        build: returns the front-end.
        seed: of the tables.
        tokenizer: whether the tokenizer of 11 words lies beside it.
        changed: fixed values of the first table, by index.

    """

    build: Callable[[], FrontEnd | Stem]
    seed: int = 0
    tokenizer: bool = False
    changed: tuple[tuple[int, float], ...] = ()


def build_frontend(name: str) -> FrontEnd | Stem:
    """Return the source of a stored artifact, as the oracle of a test."""
    recipe = RECIPES[name]
    frontend = recipe.build().eval()
    tables = list(_tables(frontend))
    drawn = draw_tables(recipe.seed, [table.numel() for table in tables])
    with torch.no_grad():
        for table, values in zip(tables, drawn, strict=True):
            table.copy_(torch.from_numpy(values).reshape(table.shape))
        for index, value in recipe.changed:
            tables[0].view(-1)[index] = value
    return frontend


def make_artifact(name: str, stored: Path) -> Path:
    """Export an artifact into `stored / name`, without random tables."""
    recipe = RECIPES[name]
    frontend = build_frontend(name)
    with tempfile.TemporaryDirectory() as place:
        tokenizer = None
        if recipe.tokenizer:
            tokenizer = Path(place) / "tokenizer.json"
            write_tokenizer(tokenizer)
        data = frontend.data() if isinstance(frontend, FrontEnd) else frontend
        source = LoadedSource(data, Source(kind="module"), tokenizer)
        exported = export_loaded(source, name, Path(place)).folder
        _drop_drawn_data(exported, frontend, recipe)
        _shorten_parity(exported / PARITY)
        folder = stored / name
        shutil.rmtree(folder, ignore_errors=True)
        return Path(shutil.copytree(exported, folder))


def _tables(frontend: FrontEnd | Stem) -> list[torch.Tensor]:
    """Return the random parameters: all except norms, filled with ones and zeros."""
    return [parameter for name, parameter in frontend.named_parameters() if "norm" not in name]


def _drop_drawn_data(folder: Path, frontend: FrontEnd | Stem, recipe: Recipe) -> None:
    """Replace a data file of random tables by the recipe to draw them."""
    data = (folder / DATA).read_bytes()
    if not data:
        return
    tables: list[dict[str, Any]] = []
    for number, table in enumerate(_tables(frontend)):
        offset = data.find(table.numpy(force=True).tobytes())
        changed = dict(recipe.changed) if number == 0 else {}
        tables.append({"size": table.numel(), "offset": offset if offset >= 0 else None, "changed": changed})
    weights = json.dumps({"seed": recipe.seed, "tables": tables}, indent=2) + "\n"
    if draw_data(json.loads(weights)) == data:
        (folder / WEIGHTS).write_text(weights)
        (folder / DATA).unlink()


def _shorten_parity(file: Path) -> None:
    """Keep one case of each comparison: no test reads more, and all would be most of the artifact."""
    report = json.loads(file.read_text())
    for provider in report["providers"].values():
        for output in provider["outputs"].values():
            del output["cases"][1:]
    file.write_text(json.dumps(report, indent=2) + "\n")


def _frontend(
    family: str, *steps: Step, max_len: int | None, bias: BiasConfig | None = None, **config: Any
) -> Callable[[], FrontEnd]:
    return lambda: FrontEnd(FrontEndConfig(family=family, steps=steps, max_len=max_len, bias=bias, **config))


def _gpt(vocab_size: int, width: int, max_len: int) -> Callable[[], FrontEnd]:
    return lambda: GPT2Embeddings(vocab_size, width, max_len)


def _vit(width: int, channels: int, image_size: int, patch_size: int) -> Callable[[], PatchStem]:
    config = PatchConfig(family="vit", width=width, channels=channels, image_size=image_size, patch_size=patch_size)
    return lambda: PatchStem(config)


def _counting(counts: Literal["slots", "ids", "mask"], *steps: Step, refused: tuple[int, ...] = ()) -> Recipe:
    positions = Positions(rows=12, counts=counts, first=2)
    return Recipe(
        _frontend(
            "counting", Tokens(rows=20, width=4), positions, *steps, max_len=10, padding_idx=1, refused_ids=refused
        ),
        seed=3,
    )


_BERT: Callable[[], FrontEnd] = lambda: BertEmbeddings(11, 4, 8)  # noqa: E731
_TOKENS = Tokens(rows=11, width=4)
_SMALL = Tokens(rows=7, width=4)
_LONG = Tokens(rows=300, width=64)
_WIDE = Tokens(rows=7, width=256)
_LEVELS = Levels(levels=(Segments(rows=5, input="sentence"), Segments(rows=6, input="word")))
_FEW_LEVELS = Levels(levels=(Segments(rows=3, input="sentence"), Segments(rows=3, input="word")))
_NINE_LEVELS = Levels(levels=tuple(Segments(rows=2, input=f"level_{number}") for number in range(9)))
_NGRAMS = NgramConfig(layers=(0, 2), size=3, heads=2, width=64, base=50, multiple=8, seed=1234, reset_id=2)
_NEAR: dict[str, Any] = {"factor": 2, "original_len": 8, "length": 16}


def _rotary(dim: int) -> tuple[RotaryOutput, ...]:
    return (RotaryOutput(config=RotaryConfig(dim=dim)),)


_TWO_ROTARY = (
    *_rotary(6),
    RotaryOutput(name="near", layout="interleaved", config=RotaryConfig(dim=4, scaling="dynamic", **_NEAR)),
)

RECIPES: dict[str, Recipe] = {
    # The repository of most tests, and further versions of its models.
    "bert": Recipe(_BERT, tokenizer=True),
    "bert-again": Recipe(_BERT, 1, tokenizer=True),
    "gpt": Recipe(_gpt(7, 4, 6), 2),
    "gpt-again": Recipe(_gpt(7, 4, 6), 9),
    "gpt-huge-value": Recipe(_gpt(7, 4, 6), changed=((12, HUGE_VALUE),)),
    # By vocabulary, width and limit: larger, so that the tables lie in the data file and answers are streamed.
    "gpt-50x4x9": Recipe(_gpt(50, 4, 9)),
    "gpt-50x4x9-again": Recipe(_gpt(50, 4, 9), 1),
    "gpt-100x32x50": Recipe(_gpt(100, 32, 50)),
    "gpt-7x256x6": Recipe(_gpt(7, 256, 6)),
    "gpt-50x64x600": Recipe(_gpt(50, 64, 600)),
    "gpt-500x96x900": Recipe(_gpt(500, 96, 900)),
    "gpt-50x768x700": Recipe(_gpt(50, 768, 700), 4),
    "gpt-300x64x5000": Recipe(_gpt(300, 64, 5000)),
    "gpt-300x64x5000-huge-value": Recipe(_gpt(300, 64, 5000), changed=((7 * 64 + 3, HUGE_VALUE),)),
    "bert-300x64x5000": Recipe(lambda: BertEmbeddings(300, 64, 5000)),
    "roberta-300x64x5000": Recipe(
        _frontend("roberta", _LONG, Positions(rows=5002, counts="ids", first=2), max_len=5000, padding_idx=1)
    ),
    "llama-300x64": Recipe(_frontend("llama", _LONG, max_len=None, rotary=_rotary(8))),
    "gpt-7x256x9000": Recipe(_gpt(7, 256, 9000)),
    "rotary-7x256x9000": Recipe(_frontend("rotary", _WIDE, max_len=9000, rotary=_rotary(32)), 1),
    "alibi-7x256x9000": Recipe(_frontend("alibi", _WIDE, max_len=9000, bias=AlibiConfig(heads=2)), 2),
    "vit-2048": Recipe(_vit(2048, 3, 8, 4), 3),
    # One for each position source, and one with a mask step.
    "counts-slots": _counting("slots"),
    "counts-ids": _counting("ids"),
    "counts-mask": _counting("mask"),
    "masked": _counting("slots", Mask(), refused=(7,)),
    # One for each further kind of input, step and output.
    "projected": Recipe(_frontend("projected", _SMALL, Positions(rows=6), Project(width=3), max_len=6)),
    "rotary": Recipe(_frontend("rotary", _TOKENS, max_len=40, rotary=_TWO_ROTARY)),
    "llama": Recipe(_frontend("llama", _TOKENS, max_len=40, rotary=_rotary(6))),
    "gemma": Recipe(_frontend("gemma", _TOKENS, Scale(by=2.5, cast=True), max_len=40, lookup=2, rotary=_rotary(6))),
    "ngrams": Recipe(_frontend("ngrams", Tokens(rows=99, width=4), max_len=2**14, ngrams=_NGRAMS)),
    "levels": Recipe(_frontend("levels", _TOKENS, _LEVELS, max_len=None), 1),
    "nine-levels": Recipe(_frontend("levels", _TOKENS, _NINE_LEVELS, max_len=None), 1),
    "segments": Recipe(
        _frontend("segments", _TOKENS, Positions(rows=9), Segments(table="tokens", rows=11, needed=True), max_len=9),
        2,
    ),
    "vit": Recipe(_vit(8, 3, 8, 4), 3),
    "vit-gray": Recipe(_vit(4, 1, 4, 2)),
    "alibi": Recipe(_frontend("alibi", _TOKENS, max_len=50, bias=AlibiConfig(heads=3)), 4),
    "alibi-levels": Recipe(
        _frontend("alibi", Tokens(rows=9, width=4), _FEW_LEVELS, max_len=50, bias=AlibiConfig(heads=3))
    ),
    "t5": Recipe(
        _frontend("t5", _TOKENS, max_len=None, bias=T5Config(heads=3, buckets=8, max_distance=20, bidirectional=False)),
        5,
    ),
    "sinusoid": Recipe(
        _frontend(
            "sinusoid", _TOKENS, max_len=50, bias=RelativeSinusoidConfig(width=4, clamp_len=None, bidirectional=True)
        ),
        6,
    ),
}


def main(names: Sequence[str]) -> None:
    """Export the artifacts of these names, or all; of all, remove the folders without a recipe."""
    if not names:
        shutil.rmtree(STORED, ignore_errors=True)
    for name in names or RECIPES:
        make_artifact(name, STORED)


if __name__ == "__main__":
    main(sys.argv[1:])
