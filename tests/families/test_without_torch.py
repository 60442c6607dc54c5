"""Every row of the family table, read, exported and verified in a process without torch, and served.

Oracles: the tensors in the file, read with torch; the PyTorch module of each row.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import preblock
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.families import FAMILIES
from preblock.models.frontend import FrontEnd
from tests.families.library_models import save
from tests.support.environments import ENVIRONMENT, install
from tests.support.servers import serve

EXPORT = """
import json, sys
from pathlib import Path
from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.export.verification import verify
refused = {}
folders, repository = json.load(sys.stdin)
for name, folder in folders.items():
    try:
        exported = export(folder, Path(folder).name, Path(repository), side=name.partition("/")[2] or None)
        parity = verify(exported.folder).providers["CPUExecutionProvider"]
        assert parity.reference.startswith("numpy ")
    except ExportError as error:
        refused[name] = str(error)
json.dump(refused, sys.stdout)
"""


def export_all(python: Path, folders: dict[str, Path], repository: Path, before: str = "") -> dict[str, str]:
    """Export folders by name in a process, after some code; return the messages of those that it refuses."""
    done = subprocess.run(
        [python, "-c", before + EXPORT],
        input=json.dumps([folders, repository], default=str),
        text=True,
        check=True,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd=repository.parent,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def write_config(folder: Path, model_type: str) -> Path:
    """Write a `config.json` of a model type alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_formats_that_need_torch_name_its_extra(tmp_path: Path) -> None:
    folders = {name: write_config(tmp_path / name, name) for name in ("vit", "unheard")}
    refused = export_all(Path(sys.executable), folders, tmp_path / "r", 'import sys\nsys.modules["torch"] = None\n')
    assert refused == {
        "vit": "an image or audio stem needs torch: pip install 'preblock[torch]'",
        "unheard": "the discovery of a front-end needs torch: pip install 'preblock[torch]'",
    }


FLOAT32_SINUSOIDS = {"ctrl", "m2m_100/encoder", "m2m_100/decoder", "speech_to_text/decoder", "xglm"}
"""Rows with a derived table whose bits are those of torch's own sines."""


def test_every_row_is_exported_and_served_without_torch(tmp_path: Path) -> None:
    folders = {name: tmp_path / f"row-{place}" for place, name in enumerate(FAMILIES)}
    for name, folder in folders.items():
        save(name, folder)
    folders["helium"] = write_config(tmp_path / "helium", "helium")
    python = install(tmp_path / "environment", "cpu", "export")
    refused = export_all(python, folders, tmp_path / "repository")
    del folders["helium"]
    assert refused.pop("helium").endswith("`pip install preblock[discover]` lets transformers describe others")
    assert refused.keys() == FLOAT32_SINUSOIDS
    assert all(message.endswith("needs torch: pip install 'preblock[torch]'") for message in refused.values()), refused
    ids = torch.tensor([[5, 6, 7]])
    with serve(tmp_path / "repository") as server, preblock.connect(server.address) as client:
        for name in folders.keys() - refused.keys():
            frontend = FrontEnd.from_data(read_frontend(folders[name], name.partition("/")[2] or None)).eval()
            with torch.inference_mode():
                expected = frontend(ids, indices=dict.fromkeys(frontend.config.needed, ids * 0)).numpy()
            indices = {index: [[0, 0, 0]] for index in frontend.config.needed}
            found = client.embed(ids.tolist(), model=folders[name].name, indices=indices).vectors
            np.testing.assert_allclose(found, expected, rtol=0, atol=0 if frontend.config.exact else 2e-6, err_msg=name)
