"""Discovery against a row of the family table: time and memory of the export of one generated checkpoint.

    python -m benchmarks.discovery FOLDER [ROWS WIDTH LAYERS]

Makes FOLDER, and removes it. Linux only; needs transformers. The checkpoint is a Llama in bfloat16 with a table of
ROWS x WIDTH; default 128256 x 2048 in 16 layers, 1.2 billion parameters. For discovery its `config.json` names a type
without a row. Each process exports a tiny checkpoint first, so that no import is measured. The figures go to standard
output as Markdown. Exits with 1 above three times the time of the row, or above 1.2 times the front-end's float32
tensors plus 1 GB.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.large_tables import run

SIZES = (128256, 2048, 16)
TINY = (64, 64, 1)
HEAD = 64
ROW, DISCOVERED = "llama", "helium"
MOST_TIME, MOST_MEMORY, OVERHEAD_BYTES = 3.0, 1.2, 10**9

EXPORT = """
import json, sys, time
from pathlib import Path
from preblock.export.exporter import export
def status(name):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
tiny, whole, repository = sys.argv[1:]
export(tiny, "tiny", Path(repository))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
base, begin, worked = status("VmRSS"), time.perf_counter(), time.process_time()
found = export(whole, "whole", Path(repository))
seconds, processor = time.perf_counter() - begin, time.process_time() - worked
result = {"seconds": seconds, "processor": processor, "peak": status("VmHWM") - base}
print(json.dumps(result | {"discovered": found.manifest.source.discovered_with}))
"""


def main() -> None:
    """Measure both, and print two columns."""
    folder, sizes = Path(sys.argv[1]), tuple(map(int, sys.argv[2:])) or SIZES
    folder.mkdir(parents=True)
    try:
        write_checkpoint(folder / "tiny", TINY)
        parameters = write_checkpoint(folder / "whole", sizes)
        by_row, discovered = (measure(folder, kind) for kind in (ROW, DISCOVERED))
    finally:
        shutil.rmtree(folder)
    tensors = 4 * sizes[0] * sizes[1]
    print(f"| {parameters / 1e6:.0f} million parameters | by row | discovered |\n|---|---|---|")
    print(f"| export | {by_row['seconds']:.1f} s | {discovered['seconds']:.1f} s |")
    print(f"| processor time | {by_row['processor']:.1f} s | {discovered['processor']:.1f} s |")
    print(
        f"| peak memory over tensors of {tensors / 1e6:.0f} MB | {_share(by_row, tensors)} | "
        f"{_share(discovered, tensors)} |"
    )
    if by_row["discovered"] or not discovered["discovered"]:
        raise SystemExit("a type has another way than expected")
    if discovered["processor"] > MOST_TIME * by_row["processor"]:
        raise SystemExit(f"discovery takes more than {MOST_TIME} times the processor time of the row")
    if discovered["peak"] > MOST_MEMORY * tensors + OVERHEAD_BYTES:
        raise SystemExit(f"discovery takes more memory than {MOST_MEMORY} times the tensors plus 1 GB")


def measure(folder: Path, kind: str) -> dict[str, Any]:
    """Return time and memory of the export as the model type `kind`."""
    for name in ("tiny", "whole"):
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind}))
    return run(EXPORT, folder / "tiny", folder / "whole", folder / kind)


def write_checkpoint(folder: Path, sizes: tuple[int, ...]) -> int:
    """Write a checkpoint of random values, and return the number of its parameters."""
    rows, width, layers = sizes
    wide = 4 * width
    folder.mkdir()
    config = {
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD,
        "num_key_value_heads": width // HEAD,
        "head_dim": HEAD,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (rows, width), "norm": (width,)}
    for layer in range(layers):
        own: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj": (width, width) for part in "qkvo"}
        own |= {"mlp.gate_proj": (wide, width), "mlp.up_proj": (wide, width), "mlp.down_proj": (width, wide)}
        own |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.{name}.weight": torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return sum(tensor.numel() for tensor in tensors.values())


def _share(found: dict[str, Any], tensors: int) -> str:
    return f"{found['peak'] / tensors:.2f} ({found['peak'] / 1e6:.0f} MB)"


if __name__ == "__main__":
    main()
