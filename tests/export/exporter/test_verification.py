"""Verification of artifacts: repeated proof, other providers, damaged files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from preblock.export import verification
from preblock.export.errors import ExportError
from preblock.export.exporter import ExportResult, export
from preblock.export.verification import verify
from preblock.service.artifacts.io import read, write
from preblock.service.artifacts.parity import ParityReport
from preblock.service.runtime import providers
from preblock.service.runtime.providers import CPU, CUDA
from preblock.service.runtime.session import Session
from tests.models.rejections import rejection
from tests.support.shared import Shared


@pytest.fixture(scope="module")
def tiny_export(tiny_checkpoint: Path, shared: Shared) -> ExportResult:
    return shared.build("tiny export", lambda root: export(str(tiny_checkpoint), "tiny", root))


@pytest.fixture
def tiny_copy(tiny_export: ExportResult, tmp_path: Path) -> Path:
    """The tiny artifact, to break."""
    return shutil.copytree(tiny_export.folder, tmp_path / "1")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stand for CUDA."""
    monkeypatch.setattr(providers, "cuda_unavailable_reason", lambda: None)
    monkeypatch.setattr(verification, "open_session", lambda folder, _, graph: Session(folder, graph=graph))


@pytest.mark.usefixtures("cuda")
def test_verify_adds_or_replaces_parity_of_provider(tiny_copy: Path, tiny_export: ExportResult) -> None:
    cpu, cuda = tiny_export.parity.providers[CPU], verify(tiny_copy, provider="cuda").providers[CUDA]
    both = ParityReport(providers={CPU: cpu, CUDA: cuda})
    assert read(ParityReport, tiny_copy / "parity.json") == both
    old = cpu.model_copy(update={"reference": "torch 0.1"})
    write(ParityReport(providers={CPU: old, CUDA: cuda}), tiny_copy / "parity.json")
    assert verify(tiny_copy, provider="cpu").providers == {CPU: cpu}
    assert read(ParityReport, tiny_copy / "parity.json") == both
    assert sorted(path.name for path in tiny_copy.iterdir()) == sorted(
        path.name for path in tiny_export.folder.iterdir()
    )
    assert (tiny_copy / "parity.json").stat().st_mode & 0o777 == 0o644


def test_verify_does_not_rewrite_unchanged_parity(tiny_copy: Path) -> None:
    before = (tiny_copy / "parity.json").stat()
    verify(tiny_copy)
    after = (tiny_copy / "parity.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.usefixtures("cuda")
def test_export_is_proven_on_every_provider(tiny_checkpoint: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    exported = export(str(tiny_checkpoint), "m", tmp_path, steps.append)
    assert list(exported.parity.providers) == [CPU, CUDA]
    assert "proving it equal on CUDAExecutionProvider" in steps


@pytest.mark.skipif(providers.cuda_unavailable_reason() is None, reason="CUDA works here")
def test_verify_without_cuda_device_fails(tiny_copy: Path) -> None:
    with pytest.raises(ExportError, match="provider cuda cannot be used: "):
        verify(tiny_copy, provider="cuda")


HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "first bit": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "last bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "truncated": lambda content: content.rstrip()[:-1],
    "missing": lambda _: None,
}


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json", "manifest.json"])
def test_verify_names_damaged_file(tiny_copy: Path, name: str) -> None:
    content = (tiny_copy / name).read_bytes()
    for harm, change in HARMS.items():
        (tiny_copy / name).unlink(missing_ok=True)
        if damaged := change(content):
            (tiny_copy / name).write_bytes(damaged)
        message = f"{name}: got sha256" if "bit" in harm and name != "manifest.json" else name
        assert rejection(ExportError, verify, tiny_copy).startswith(message), harm


@pytest.mark.parametrize(("field", "value"), [("max_len", 5000), ("counts", "mask"), ("width", 16)])
def test_verify_detects_wrong_manifest_field(tiny_copy: Path, field: str, value: int | str) -> None:
    manifest = json.loads((tiny_copy / "manifest.json").read_text())
    (tiny_copy / "manifest.json").write_text(json.dumps(manifest | {field: value}))
    with pytest.raises(ExportError, match=rf"manifest\.json: {field} is {value!r}, but the artifact has"):
        verify(tiny_copy)


@pytest.mark.parametrize("steps", [["tokens"], [{"kind": "tokens"}], [], None])
def test_verify_rejects_malformed_steps(tiny_copy: Path, steps: object) -> None:
    manifest = json.loads((tiny_copy / "manifest.json").read_text())
    manifest["front_end"]["steps"] = steps
    (tiny_copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ExportError, match=r"manifest and weights disagree: |^manifest\.json front_end: "):
        verify(tiny_copy)
