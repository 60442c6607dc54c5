"""The service with the variables of the image, and with the cache of a hub, made by hand."""

import hashlib
import re
import shutil
from pathlib import Path

import httpx
import numpy as np

from tests.families.library_models import TransformersModel, save
from tests.support.paths import ROOT
from tests.support.servers import serve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_cache(folder: Path, checkpoint: Path) -> None:
    """Put a checkpoint into a cache of the hub, as `owner/name`."""
    repository = folder / "models--owner--name"
    for part in ("refs", "blobs", f"snapshots/{COMMIT}"):
        (repository / part).mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    for file in checkpoint.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, repository / "blobs" / blob)
        (repository / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{blob}")


def test_image_serves_hub_model_offline_from_its_cache(tmp_path: Path) -> None:
    """The user of the image has no home, and a cache mounted read-only takes no new file."""
    save("gpt2", tmp_path / "checkpoint")
    make_cache(tmp_path / "data", tmp_path / "checkpoint")
    before = sorted((tmp_path / "data").rglob("*"))
    variables = re.findall(r"(HF_\w+)=/data\b", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert variables == ["HF_HOME", "HF_HUB_CACHE"]
    environment = dict.fromkeys(variables, str(tmp_path / "data")) | {"HF_HUB_OFFLINE": "1", "HOME": "/proc/none"}
    with serve(tmp_path / "models", "hf:owner/name", **environment) as server:
        given = {"input_ids": [[3, 4, 5]], "encoding": "float"}
        found = httpx.post(f"{server.address}/models/name/embed", json=given).raise_for_status().json()
    expected = TransformersModel.load("gpt2", tmp_path / "checkpoint").first_block_input(np.array([[3, 4, 5]]))
    assert np.array_equal(np.float32(found["embeddings"]), expected)
    assert sorted((tmp_path / "data").rglob("*")) == before
