"""A request for vectors."""

import numpy as np
from numpy.typing import NDArray

BYTES = "application/octet-stream"
VOCABULARY, WIDTH = 500, 96
Ids = NDArray[np.int64]


def raw(ids: Ids, offset: int) -> tuple[str, bytes, dict[str, str]]:
    path = f"/models/gpt/versions/1/embed?offset={offset}&shape={ids.shape[0]},{ids.shape[1]}"
    return path, ids.tobytes(), {"Content-Type": BYTES, "Accept": BYTES}
