"""Every row of the family table, read in a process without torch. Oracles: the tensors in the file, read with torch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from preblock.models.checkpoints.families import FAMILIES
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from tests.families.library_models import save

FILE = "model.safetensors"
TYPES = (torch.float32, torch.bfloat16, torch.float16)
READ = """
import json, sys
from pathlib import Path
class Refuser:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is refused")
sys.meta_path.insert(0, Refuser())
import numpy as np
import preblock.export.source
from preblock.models.checkpoints.reader import read_frontend
for name, folder in json.load(sys.stdin).items():
    frontend = read_frontend(Path(folder), name.partition("/")[2] or None)
    np.savez(Path(folder) / "read.npz", **frontend.tensors)
    (Path(folder) / "read.json").write_text(json.dumps(frontend.config.to_document()))
"""


def test_every_row_is_read_without_torch(tmp_path: Path) -> None:
    folders = {name: tmp_path / str(place) for place, name in enumerate(FAMILIES)}
    for place, (name, folder) in enumerate(folders.items()):
        save(name, folder, TYPES[place % 3])
    subprocess.run([sys.executable, "-c", READ], input=json.dumps(folders, default=str), text=True, check=True)
    for name, folder in folders.items():
        found = np.load(folder / "read.npz")
        config = FrontEndConfig.from_document(json.loads((folder / "read.json").read_text()))
        expected = {name: tuple(tensor.shape) for name, tensor in FrontEnd(config).state_dict().items()}
        assert {key: array.shape for key, array in found.items()} == expected, name
        # One after the other by name, because the table of n-grams has several parts.
        stored = b"".join(tensor.float().numpy().tobytes() for _, tensor in sorted(load_file(folder / FILE).items()))
        assert all(array.tobytes() in stored for array in found.values()), name
