"""What is no published family, in onnx's own evaluator and in a bare onnxruntime; `tests/families` does those."""

import copy
from pathlib import Path

import pytest

from incipit.export.bias import export_bias
from incipit.export.exporter import export
from incipit.export.formats import FORMATS, Format
from incipit.export.graph import export_graph
from incipit.export.stem import export_stem
from incipit.models.custom import CustomFrontEnd
from incipit.models.initialisers import seeded_
from incipit.models.stems import PatchConfig
from tests.elsewhere.standard import check_standard
from tests.export import test_bias, test_graph, test_module, test_stem, test_steps
from tests.families.published import save

FRONTENDS = test_graph.FRONTENDS | test_steps.FRONTENDS


@pytest.mark.parametrize("kind", FRONTENDS)
def test_tokens(kind: str, tmp_path: Path) -> None:
    frontend = copy.deepcopy(FRONTENDS[kind]).eval()
    seeded_(frontend, 1)
    export_graph(frontend, tmp_path)
    check_standard(tmp_path)


@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: f"{stored.dtype}-{stored.scale}")
def test_stored_types(stored: Format, tmp_path: Path) -> None:
    for name in ("bert", "gpt2"):
        save(name, tmp_path / name)
        scale = stored.scale if stored.dtype == "int8" else None  # which alone has a choice
        done = export(str(tmp_path / name), name, tmp_path / "models", dtype=stored.dtype, scale=scale)
        check_standard(done.folder)


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    export_graph(CustomFrontEnd(test_module.Mine().eval(), test_module.V, test_module.M), tmp_path)
    check_standard(tmp_path)


@pytest.mark.parametrize("kind", test_bias.MODULES)
def test_a_bias(kind: str, tmp_path: Path) -> None:
    export_bias(test_bias.MODULES[kind](), tmp_path)
    check_standard(tmp_path)


@pytest.mark.parametrize("kind", test_stem.STEMS)
def test_a_stem(kind: str, tmp_path: Path) -> None:
    stem = test_stem.STEMS[kind]
    export_stem(stem, tmp_path)
    check_standard(tmp_path)
    if isinstance(stem.config, PatchConfig):
        check_standard(tmp_path, height=stem.config.image_size, width=stem.config.image_size)
