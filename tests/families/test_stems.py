"""Every row of the table of stems, exported, run in a bare onnxruntime, and compared with transformers itself."""

from pathlib import Path

import pytest

from preblock.export.exporter import export
from preblock.export.stems.graph import allowed_ulp
from preblock.export.verification import verify
from preblock.models.checkpoints.stem_reader import read_stem, stem_files_needed
from preblock.models.families import STEMS
from tests.families.parity import compare_stem
from tests.families.stems import MODELS, ROWS, save


def test_stem_table_rows_have_oracles() -> None:
    assert sorted(ROWS.values()) == sorted(STEMS)


@pytest.mark.parametrize("name", ROWS)
def test_stem_matches_transformers(name: str, tmp_path: Path) -> None:
    checkpoint, side = save(name, tmp_path / "checkpoint"), MODELS[name][2]
    exported = export(str(checkpoint), "stem", tmp_path / "repository", side=side)
    allowed = allowed_ulp(read_stem(checkpoint, side).signature)
    for difference in compare_stem(name, exported.folder):
        assert difference.max_ulp <= allowed, difference
    assert verify(exported.folder) == exported.parity


def test_stem_files_needed_are_shards_of_its_tensors(tmp_path: Path) -> None:
    save("whisper", tmp_path / "whole")
    assert stem_files_needed(tmp_path / "whole", "encoder") == ["model.safetensors"]
    save("whisper", tmp_path / "shards", max_shard_size="2kB")
    needed = stem_files_needed(tmp_path / "shards", "encoder")
    assert 0 < len(needed) < len(list((tmp_path / "shards").glob("*.safetensors")))
    for file in (tmp_path / "shards").glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    read_stem(tmp_path / "shards", "encoder")
