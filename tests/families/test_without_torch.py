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

REFUSE = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from preblock.export.errors import ExportError
from preblock.export.exporter import export
for folder in sys.argv[1:]:
    try:
        export(folder, "m", Path(folder))
    except ExportError as error:
        print(error)
"""


def test_formats_that_need_torch_name_its_extra(tmp_path: Path) -> None:
    folders = {"vit": tmp_path / "stem", "unheard": tmp_path / "discovered"}
    for model_type, folder in folders.items():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    done = subprocess.run([sys.executable, "-c", REFUSE, *folders.values()], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{purpose} needs torch: pip install 'preblock[torch]'"
        for purpose in ("an image or audio stem", "the discovery of a front-end")
    ]


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
FLOAT32_SINUSOIDS = {"ctrl", "m2m_100/encoder", "m2m_100/decoder", "speech_to_text/decoder", "xglm"}
"""Rows with a derived table whose bits are those of torch's own sines."""


def test_every_row_is_exported_and_served_without_torch(tmp_path: Path) -> None:
    folders = {name: tmp_path / f"row-{place}" for place, name in enumerate(FAMILIES)}
    for name, folder in folders.items():
        save(name, folder)
    given = json.dumps([folders, tmp_path / "repository"], default=str)
    python = install(tmp_path / "environment", "cpu", "export")
    done = subprocess.run(
        [python, "-c", EXPORT],
        input=given,
        text=True,
        check=True,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd=tmp_path,
    )
    refused = json.loads(done.stdout)
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
