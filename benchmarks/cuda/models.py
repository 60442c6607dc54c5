"""The measured models: gpt2-small and three other kinds of front-ends, exported and proven on both providers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.streams import MODEL, WIDTH
from preblock.export import export_module
from preblock.models import BertEmbeddings, FrontEnd, FrontEndConfig, GPT2Embeddings, TransformerEmbedding
from preblock.models.steps import Norm, Positions, Project, Segments, Tokens
from preblock.service.artifacts.io import read_with_identity
from preblock.service.artifacts.manifest import Manifest
from preblock.service.runtime.cuda_embedding import CudaLookup
from preblock.service.runtime.fused_embedding import map_tables


def project() -> FrontEnd:
    """Return a front-end like ELECTRA's: 128 columns, a norm, and a projection to 768."""
    steps = (
        Tokens(rows=30522, width=128),
        Segments(rows=2),
        Positions(rows=512),
        Norm(eps=1e-12),
        Project(width=WIDTH),
    )
    return FrontEnd(FrontEndConfig(family="electra", steps=steps, max_len=512))


FRONT_ENDS: dict[str, Callable[[], FrontEnd]] = {
    MODEL: lambda: GPT2Embeddings(50257, WIDTH, 1024),
    "sinusoidal": lambda: TransformerEmbedding(32000, WIDTH, 4096),
    "norm": lambda: BertEmbeddings(30522, WIDTH, 512),
    "projection": project,
}


def open_kernel(artifact: Path) -> CudaLookup | None:
    """Return the kernel of an artifact; None if its vectors are no sums of token and position rows."""
    manifest, _ = read_with_identity(artifact)
    if not isinstance(manifest, Manifest) or manifest.kernel is None:
        return None
    return CudaLookup(map_tables(artifact, manifest, manifest.kernel))


def main(work: Path, artifacts: Path, minutes: float) -> dict[str, Any]:
    """Export each front-end to `WORK/repository`, and return its parity by provider."""
    del artifacts, minutes
    return {name: parity(build(), name, work / "repository") for name, build in FRONT_ENDS.items()}


def parity(frontend: FrontEnd, name: str, repository: Path) -> dict[str, str]:
    """Export a front-end, and return the summary of its proof by provider."""
    found = {key: value.summary() for key, value in export_module(frontend, name, repository).parity.providers.items()}
    print(name, found, flush=True)
    return found
