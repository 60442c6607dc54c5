"""Time rotary angles and an ALiBi bias in PyTorch, beside a copy of vectors: `python -m benchmarks.positions`."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from preblock.models import AlibiBias
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding

BATCH, LENGTH, WIDTH, HEADS = 32, 512, 768, 12
ROUNDS = 75


def main() -> None:
    """Print the median of each, divided by the median of the copy, with one thread."""
    torch.set_num_threads(1)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    offsets = torch.arange(BATCH)
    vectors = np.ones((BATCH, LENGTH, WIDTH), np.float32)
    target = np.empty_like(vectors)
    rotary, alibi = RotaryEmbedding(RotaryConfig(dim=WIDTH // HEADS)), AlibiBias(heads=HEADS)
    measured: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, vectors),
        "rotary, one offset": lambda: rotary(ids, offset=0),
        "rotary, an offset for each row": lambda: rotary(ids, offset=offsets),
        "ALiBi": lambda: alibi(0, LENGTH, LENGTH),
    }
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, run in measured.items():
                begin = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begin)
    copy = statistics.median(seconds["copy"])
    for name, times in seconds.items():
        print(f"{name}: {statistics.median(times) / copy:.2f}")


if __name__ == "__main__":
    main()
