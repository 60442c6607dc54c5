"""Files of a hostile or damaged checkpoint: pipes, links, modes, and numbers that are none."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from preblock.models.checkpoints.family_lookup import is_stem
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.toml_config import files_described, read_description
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.frontend_file import INDEX

CONFIG: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 11, "n_embd": 4, "n_positions": 6}
TENSORS = {"wte.weight": torch.ones(11, 4), "wpe.weight": torch.ones(6, 4)}


def write(folder: Path) -> Path:
    """Write a GPT-2 in two files."""
    folder.mkdir(parents=True)
    for number, (key, tensor) in enumerate(TENSORS.items()):
        save_file({key: tensor}, folder / f"{number}.safetensors")
    index = {"weight_map": {key: f"{number}.safetensors" for number, key in enumerate(TENSORS)}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    return write(tmp_path / "gpt")


@pytest.mark.parametrize("name", ["config.json", INDEX, "1.safetensors"])
def test_pipe_is_rejected_without_blocking(gpt: Path, name: str) -> None:
    (gpt / name).unlink()
    os.mkfifo(gpt / name)
    with pytest.raises(CheckpointError, match=rf"{name}: a folder, pipe or device, expected a regular file"):
        read_frontend(gpt)


def test_description_pipe_is_rejected(gpt: Path) -> None:
    os.mkfifo(gpt / "frontend.toml")
    for reader in (read_description, files_described):
        with pytest.raises(CheckpointError, match=r"frontend\.toml: a folder, pipe or device"):
            reader(gpt)


@pytest.mark.parametrize("name", [INDEX, "1.safetensors"])
def test_pointer_of_git_lfs_is_rejected(gpt: Path, name: str) -> None:
    (gpt / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n")
    with pytest.raises(CheckpointError, match=rf"{name}: a pointer of Git LFS, .*; run `git lfs pull`"):
        read_frontend(gpt)


@pytest.mark.parametrize("name", ["config.json", INDEX, "1.safetensors"])
def test_link_to_device_is_rejected(gpt: Path, name: str) -> None:
    (gpt / name).unlink()
    (gpt / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=rf"{name}: a link to /dev/zero, outside the folder"):
        read_frontend(gpt)


@pytest.mark.parametrize("name", ["config.json", INDEX, "1.safetensors"])
def test_link_outside_folder_is_rejected(gpt: Path, name: str) -> None:
    outside = gpt.parent / f"outside-{name}"
    shutil.move(gpt / name, outside)
    (gpt / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=rf"{name}: a link to .*outside-{name}, outside the folder; replace"):
        read_frontend(gpt)


@pytest.mark.parametrize("name", ["config.json", INDEX, "1.safetensors"])
def test_link_within_folder_is_read(gpt: Path, name: str) -> None:
    shutil.move(gpt / name, gpt / f"other-{name}")
    (gpt / name).symlink_to(f"other-{name}")
    assert read_frontend(gpt).config.max_len == 6


def test_link_to_checkpoint_folder_is_followed(gpt: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(gpt)
    assert read_frontend(tmp_path / "link").config.max_len == 6


def test_hub_cache_links_are_followed_only_to_blobs(gpt: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in gpt.iterdir():
        shutil.copyfile(file, blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    assert read_frontend(snapshot).config.max_len == 6
    (blobs / "hash-1.safetensors").unlink()
    (blobs / "hash-1.safetensors").symlink_to(gpt / "1.safetensors")
    with pytest.raises(CheckpointError, match=r"1\.safetensors: a link to .*, outside the folder"):
        read_frontend(snapshot)


@pytest.mark.parametrize("name", ["config.json", INDEX, "1.safetensors"])
def test_dangling_link_is_rejected(gpt: Path, name: str) -> None:
    (gpt / name).unlink()
    (gpt / name).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"{name}: no such file or directory"):
        read_frontend(gpt)


@pytest.fixture
def private() -> Iterator[Path]:
    """Run as an ordinary user, whose folder has a checkpoint that belongs to root; outside pytest's private folders."""
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder = write(Path(place) / "gpt")
        for file in folder.iterdir():
            file.chmod(0o644)
        os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["config.json", INDEX, "1.safetensors"])
def test_unreadable_file_reports_permission_denied(private: Path, name: str) -> None:
    os.seteuid(0)
    (private / name).chmod(0o600)
    os.seteuid(65534)
    with pytest.raises(CheckpointError, match=rf"{name}: permission denied"):
        read_frontend(private)


def test_unreadable_folder_reports_permission_denied(private: Path) -> None:
    os.seteuid(0)
    private.chmod(0o700)
    os.seteuid(65534)
    with pytest.raises(CheckpointError, match=r"config\.json: permission denied"):
        read_frontend(private)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("place", ['"layer_norm_epsilon": {}', '"anything": [{{"else": {}}}]'])
def test_non_finite_number_in_config_is_rejected(gpt: Path, place: str, number: str) -> None:
    text = json.dumps(CONFIG).removesuffix("}") + ", " + place.format(number) + "}"
    (gpt / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: got the number {number}, expected finite numbers"):
        read_frontend(gpt)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999"])
def test_non_finite_number_in_description_is_rejected(gpt: Path, number: str) -> None:
    text = '[[steps]]\nkind = "tokens"\nweight = "wte.weight"\n\n[[steps]]\nkind = "scale"\nby = '
    (gpt / "frontend.toml").write_text(text + number)
    with pytest.raises(CheckpointError, match=rf"frontend\.toml: got the number {number}, expected finite numbers"):
        read_description(gpt)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_deeply_nested_json_is_rejected(gpt: Path, name: str) -> None:
    (gpt / name).write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match=rf"{name}: lists or objects are nested too deeply"):
        read_frontend(gpt)


def test_deeply_nested_description_is_rejected(gpt: Path) -> None:
    (gpt / "frontend.toml").write_text("steps = " + "[" * 100_000)
    for reader in (read_description, files_described):
        with pytest.raises(CheckpointError, match=r"frontend\.toml: "):
            reader(gpt)


@pytest.mark.parametrize("model_type", ["bart/encoder", "clip/text", "clip/vision", "whisper/encoder"])
def test_family_name_with_side_as_model_type_is_rejected(gpt: Path, model_type: str) -> None:
    (gpt / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}))
    assert not is_stem(gpt)
    with pytest.raises(CheckpointError, match=f"the model_type '{model_type}' is unknown"):
        read_frontend(gpt)
