"""Files of a hostile or damaged checkpoint: pipes, links, modes, and numbers that are none."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from preblock.models.checkpoints.family_lookup import is_stem
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.toml_config import files_described, read_description
from preblock.models.checkpoints.weight_files import CheckpointError, describe_second_source
from preblock.models.frontend_file import INDEX
from tests.models.rejections import rejection
from tests.support.permissions import ordinary_user, public_folder

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


def become_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def move_to(place: str) -> Callable[[Path], None]:
    """Return a change that moves a file, and leaves a link to it."""

    def move(file: Path) -> None:
        shutil.move(file, file.parent / place)
        file.symlink_to(place)

    return move


def link_to(place: str) -> Callable[[Path], None]:
    def link(file: Path) -> None:
        file.unlink()
        file.symlink_to(place)

    return link


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (become_pipe, "a folder, pipe or device, expected a regular file"),
    (lambda file: file.write_text(LFS), "a pointer of Git LFS, .*; run `git lfs pull`"),
    (link_to("/dev/zero"), "a link to /dev/zero, outside the folder"),
    (move_to("../outside"), "a link to .*outside, outside the folder; replace"),
    (link_to("nowhere"), "no such file or directory"),
]


@pytest.mark.parametrize("name", ["config.json", INDEX, "1.safetensors"])
def test_damaged_file_is_rejected(name: str, tmp_path: Path) -> None:
    for number, (damage, message) in enumerate(DAMAGES):
        folder = write(tmp_path / str(number))
        damage(folder / name)
        assert re.search(f"{name}: {message}", rejection(CheckpointError, read_frontend, folder))


def test_damaged_description_is_rejected(gpt: Path) -> None:
    os.mkfifo(gpt / "frontend.toml")
    for reader in (read_description, files_described):
        assert "frontend.toml: a folder, pipe or device" in rejection(CheckpointError, reader, gpt)
    (gpt / "frontend.toml").unlink()
    (gpt / "frontend.toml").write_text("steps = " + "[" * 100_000)
    for reader in (read_description, files_described):
        assert "frontend.toml: " in rejection(CheckpointError, reader, gpt)


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
    message = "1.safetensors: a link to .*, outside the folder"
    assert re.search(message, rejection(CheckpointError, read_frontend, snapshot))


def test_unreadable_file_or_folder_is_rejected() -> None:
    with public_folder() as place:
        folder = write(place / "gpt")
        for made in folder.iterdir():
            made.chmod(0o644)
        for file in (folder / "1.safetensors", folder / "config.json", folder):
            file.chmod(0o600)
            name = "config.json" if file == folder else file.name
            with ordinary_user():
                assert f"{name}: permission denied" in rejection(CheckpointError, read_frontend, folder)


def test_non_finite_number_is_rejected(gpt: Path) -> None:
    steps = '[[steps]]\nkind = "tokens"\nweight = "wte.weight"\n\n[[steps]]\nkind = "scale"\nby = '
    for place in ('"layer_norm_epsilon": {}', '"anything": [{{"else": {}}}]'):
        for number in ("NaN", "Infinity", "-Infinity", "1e999"):
            (gpt / "config.json").write_text(json.dumps(CONFIG).removesuffix("}") + f", {place.format(number)}}}")
            message = f"config.json: got the number {number}, expected finite numbers"
            assert message in rejection(CheckpointError, read_frontend, gpt)
    for number in ("nan", "inf", "-inf", "1e999"):
        (gpt / "frontend.toml").write_text(steps + number)
        message = f"frontend.toml: got the number {number}, expected finite numbers"
        assert message in rejection(CheckpointError, read_description, gpt)


def test_deeply_nested_json_is_rejected(gpt: Path) -> None:
    for name in (INDEX, "config.json"):
        (gpt / name).write_text('{"a":' * 100_000)
        message = f"{name}: lists or objects are nested too deeply"
        assert message in rejection(CheckpointError, read_frontend, gpt)


def test_family_name_with_side_as_model_type_is_rejected(gpt: Path) -> None:
    for model_type in ("bart/encoder", "clip/vision", "whisper/encoder"):
        config = CONFIG | {"model_type": model_type}
        (gpt / "config.json").write_text(json.dumps(config))
        assert not is_stem(config)
        assert f"the model_type '{model_type}' is unknown" in rejection(CheckpointError, read_frontend, gpt)


def test_index_that_names_the_file_beside_it_is_no_second_form(gpt: Path) -> None:
    (gpt / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}))
    save_file(TENSORS, gpt / "model.safetensors")
    assert describe_second_source(gpt) == ""
    (gpt / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "0.safetensors")}))
    assert "model.safetensors" in describe_second_source(gpt)
