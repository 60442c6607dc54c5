"""The graph of tiles: the vectors of the plain one, for every way of cutting a call."""

import onnx
import pytest

from preblock.export.errors import ParityError
from preblock.export.exporter import Exported, export
from preblock.export.parity import prove_tiles
from preblock.export.tiles import tiles_of
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.service.artifacts.manifest import IN_TILES, Manifest, Tiles
from preblock.service.runtime.session import CPU, Session
from tests.families.published import save

FAMILIES = {"roberta": True, "gpt2": True, "llama": False, "albert": False}
"""Whether a family has a graph of tiles: one that looks vectors up and nothing else, or has a projection, has none."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    root = tmp_path_factory.mktemp("tiles")
    for name in FAMILIES:
        save(name, root / "checkpoints" / name)
    return {name: export(str(root / "checkpoints" / name), name, root) for name in FAMILIES}


@pytest.mark.parametrize(("name", "tiled"), FAMILIES.items())
def test_a_family_whose_vectors_are_computed_has_one(artifacts: dict[str, Exported], name: str, tiled: bool) -> None:
    manifest = artifacts[name].manifest
    assert isinstance(manifest, Manifest)
    assert ("tiles.onnx" in manifest.graphs) == (manifest.tiles is not None) == tiled
    if tiled:
        parity = artifacts[name].parity.providers[CPU].outputs[IN_TILES]
        assert parity.max_abs == 0
        assert {case.arguments["tiles"] for case in parity.cases} == {"rows", "tokens"}
        assert [node.op_type for node in onnx.load(artifacts[name].folder / "tiles.onnx").graph.node][-1] == "If"


def test_another_table_of_positions_in_it_is_found(artifacts: dict[str, Exported]) -> None:
    folder = artifacts["gpt2"].folder
    model = onnx.load(folder / "tiles.onnx", load_external_data=False)
    names = {tensor.name: tensor for tensor in model.graph.initializer}
    places = [names[f"frontend.{table}.weight"].external_data for table in ("tokens", "positions")]
    offsets = [entry for place in places for entry in place if entry.key == "offset"]
    offsets[1].value = offsets[0].value
    (folder / "wrong.onnx").write_bytes(model.SerializeToString())
    assert artifacts["gpt2"].manifest.front_end is not None
    frontend = FrontEnd(FrontEndConfig.from_document(artifacts["gpt2"].manifest.front_end))
    with pytest.raises(ParityError, match=r"embeddings in tiles .* tiles"):
        prove_tiles(frontend.signature, Session(folder, graph="wrong.onnx"), Session(folder))
    (folder / "wrong.onnx").unlink()


def test_a_tile_is_a_mebibyte_of_vectors_in_a_power_of_two() -> None:
    assert tiles_of(768) == Tiles(size=256, least=2048)
    assert tiles_of(4096) == Tiles(size=64, least=512)
    assert tiles_of(2**19) == Tiles(size=1, least=8)
    assert tiles_of(1) == Tiles(size=2**16, least=2**19)
