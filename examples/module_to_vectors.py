"""From a PyTorch module to vectors in ten lines: export it, open the artifact, and compare.

    .venv/bin/python examples/module_to_vectors.py --repository model_repository

Afterwards `preblock serve` also serves the artifact, as the model `mine`.
"""

import argparse
import tempfile
from pathlib import Path

try:
    import onnxruntime
    import torch
    from torch import Tensor, nn

    from preblock.export import export_module
    from preblock.failures import fails_in_one_line
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs {missing.name}. After `make serve`: .venv/bin/python -m pip install -e '.[torch]', "
        "and run it with .venv/bin/python; elsewhere: pip install 'preblock[cpu,torch]'"
    ) from None

VOCABULARY, WIDTH, MAX_LEN = 1000, 64, 128


class MyEmbeddings(nn.Module):
    """Tokens + learned positions, as in any code base."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MAX_LEN, WIDTH)

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        """Return the vectors (B, L, D) of ids (B, L) at the offset of each row, (1,) or (B,)."""
        rows = torch.arange(input_ids.shape[1]) + offset[:, None]
        vectors: Tensor = self.tokens(input_ids) + self.positions(rows)
        return vectors


def run(repository: Path) -> bool:
    """Export the module into `repository`, and return whether its artifact gives the same bits."""
    torch.manual_seed(0)
    module = MyEmbeddings().eval()
    export_module(module, "mine", repository, vocab_size=VOCABULARY, max_len=MAX_LEN)
    newest = max((repository / "mine").iterdir(), key=lambda version: int(version.name))
    session = onnxruntime.InferenceSession(newest / "model.onnx")
    ids, offset = torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([0, 40])
    (vectors,) = session.run(["embeddings"], {"input_ids": ids.numpy(), "offset": offset.numpy()})
    print(f"{newest}: {vectors.shape}, first numbers {vectors[0, 0, :3]}")
    return torch.equal(torch.from_numpy(vectors), module(ids, offset))


@fails_in_one_line
def main(arguments: list[str] | None = None) -> None:
    """Export, run, and compare."""
    parser = argparse.ArgumentParser(description="From a PyTorch module to vectors in ten lines.")
    parser.add_argument("--repository", type=Path, help="folder of artifacts; default: a temporary one")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if not run(given.repository or Path(folder)):
            raise SystemExit("The artifact gives other bits than the module.")
    print("The artifact gives the bits of the module.")


if __name__ == "__main__":
    main()
