"""Seeded values of tables: the same on every processor.

Another C library may round the logarithms of rare values otherwise, by one unit in the last place.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

DEFAULT_STD = 0.02
"""Standard deviation of the tables of BERT and GPT-2 (Devlin et al. 2018, Radford et al. 2019)."""


def fill_seeded(tables: Iterable[NDArray[np.float32]], seed: int) -> None:
    """Fill float32 `tables` in order from normal(0, 0.02) with PCG64(seed)."""
    generator = np.random.Generator(np.random.PCG64(seed))
    for table in tables:
        generator.standard_normal(dtype=np.float32, out=table)
        table *= np.float32(DEFAULT_STD)
