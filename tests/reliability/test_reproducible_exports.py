"""The same source gives the same bytes: two exports as different users in different places would run them."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from torch.backends.cpu import get_cpu_capability

from preblock.service.artifacts.io import read_with_identity
from preblock.service.artifacts.names import GRAPH, MANIFEST, PARITY
from tests.export.conftest import save_tiny
from tests.families.library_models import save
from tests.support.paths import ROOT

EXPORT = """
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from preblock.export import export_module
from preblock.export.exporter import export
from tests.support.torchlib import read_once


class Own(nn.Module):
    '''A table, a constant, and a graph within the graph.'''

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(50, 16, generator=generator))
        self.register_buffer("constant", torch.randn(16, 16, generator=generator))

    def forward(self, input_ids, offset):
        positions = torch.arange(input_ids.shape[1]) + offset.reshape(-1, 1)
        x = torch.nn.functional.gelu(self.table[input_ids] + self.table[positions] @ self.constant)
        return torch.cond(offset.sum() > 3, lambda x: x * 2, lambda x: x + x, (x,))


read_once(pytest.MonkeyPatch())
sources, repository = Path(sys.argv[1]), Path(sys.argv[2])
names = ["bert", "ctrl", "own", "resized"]
for name in reversed(names) if sys.argv[3] == "reversed" else names:
    if name == "own":
        export_module(Own(), name, repository, vocab_size=50, max_len=50)
    elif name == "resized":
        export(str(sources / "bert"), name, repository, max_len=37, resizing="interpolate")
    else:
        export(str(sources / name), name, repository)
"""
NAMES = ["bert", "ctrl", "own", "resized"]
BLOCKS_OF_AVX2 = """
import numpy as np
import torch
from preblock.models.float32_powers import vector_powers
torch.set_num_threads(1)  # each thread would end with numbers outside of blocks
draw = np.random.default_rng(2)
bases, exponents = np.exp(draw.uniform(0, 25, 2**20)).astype(np.float32), draw.uniform(0, 1, 2**20).astype(np.float32)
expected = torch.pow(torch.from_numpy(bases), torch.from_numpy(exponents)).numpy()
print(torch.backends.cpu.get_cpu_capability(), np.array_equal(vector_powers(bases, exponents), expected))
"""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two repositories of the same four models."""
    ctrl = tmp_path_factory.mktemp("saved") / "ctrl"  # its sinusoids are computed in float32
    save("ctrl", ctrl)
    save_tiny(ctrl.with_name("bert"))
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second") / "deeper \u00e9"
    running = []
    for place, order, environment in (
        (first, "", {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}),
        (
            second,
            "reversed",
            {
                "PYTHONHASHSEED": "4242",
                "OMP_NUM_THREADS": "3",
                "HOME": str(second / "home"),
                "USER": "somebody",
                "LOGNAME": "somebody",
                "TZ": "Asia/Tokyo",
                "LC_ALL": "C",
                "TMPDIR": str(second / "home"),
                "SOURCE_DATE_EPOCH": "1",
            },
        ),
    ):
        (place / "home").mkdir(parents=True)
        shutil.copytree(ctrl.with_name("bert"), place / "sources/bert")
        shutil.copytree(ctrl, place / "sources/ctrl")
        (place / "script.py").write_text(EXPORT)
        running.append(
            subprocess.Popen(
                [sys.executable, place / "script.py", place / "sources", place / "repository", order],
                cwd=place / "home",
                env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
                umask=0o077 if order else 0o022,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in running:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return first, second


@pytest.mark.parametrize("name", NAMES)
def test_exports_by_different_users_have_same_bytes(repositories: tuple[Path, Path], name: str) -> None:
    first, second = (place / "repository" / name / "1" for place in repositories)
    files = {file.name for file in first.iterdir()}
    assert files == {file.name for file in second.iterdir()}
    for file in sorted(files - {PARITY}):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    assert read_with_identity(first) == read_with_identity(second)


@pytest.mark.parametrize("name", NAMES)
def test_artifact_files_contain_no_machine_details(repositories: tuple[Path, Path], name: str) -> None:
    for place in repositories:
        for file in (place / "repository" / name / "1").iterdir():
            content = file.read_bytes()
            for trace in (place.name, "script.py", "somebody", socket.gethostname(), sys.prefix, str(ROOT)):
                assert trace.encode() not in content, (file, trace)
            if file.suffix == ".onnx":
                assert b".py" not in content
                assert b"pkg.torch" not in content


def test_custom_module_graph_has_subgraph(repositories: tuple[Path, Path]) -> None:
    model = onnx.load(repositories[0] / "repository/own/1" / GRAPH, load_external_data=False)
    assert [attribute.name for node in model.graph.node for attribute in node.attribute if attribute.HasField("g")]


def test_different_sources_have_different_identities(repositories: tuple[Path, Path]) -> None:
    identities = {read_with_identity(repositories[0] / "repository" / name / "1")[1] for name in NAMES}
    assert len(identities) == len(NAMES)


def test_identity_ignores_whitespace_and_key_order(repositories: tuple[Path, Path], tmp_path: Path) -> None:
    folder = repositories[0] / "repository/bert/1"
    record = json.loads((folder / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(dict(reversed(record.items())), indent=7))
    assert read_with_identity(tmp_path)[1] == read_with_identity(folder)[1]
    (tmp_path / MANIFEST).write_text(json.dumps(record | {"max_len": 1}))
    assert read_with_identity(tmp_path)[1] != read_with_identity(folder)[1]


@pytest.mark.skipif(get_cpu_capability() not in ("AVX512", "AVX2"), reason="the processor has no AVX2")
def test_powers_of_torch_have_same_bits_with_avx2() -> None:
    command, environment = [sys.executable, "-c", BLOCKS_OF_AVX2], {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "AVX2 True\n"
