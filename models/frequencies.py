"""Frequencies of rotary angles and slopes of attention biases, as NumPy arrays.

Letters: R rotary width, H heads, D width.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.models.modules.bias import AlibiConfig, T5Config
from preblock.models.modules.rotary_config import SCALINGS, RotaryConfig


def rotary_frequencies(config: RotaryConfig) -> NDArray[Any]:
    """Return the R/2 frequencies in radians per position, in the type `config.angles`."""
    frequencies: NDArray[Any] = SCALINGS[config.scaling].frequencies(config).numpy()
    return frequencies


def attention_factor(config: RotaryConfig) -> float:
    """Return the factor on cosines and sines."""
    return SCALINGS[config.scaling].attention_factor(config)


def alibi_slopes(config: AlibiConfig) -> NDArray[np.float32]:
    """Return the slopes of all heads, float32 (H,), rounded to the arithmetic of the bias."""
    from preblock.models.modules.bias_modules import AlibiBias, build_bias

    module = build_bias(config)
    assert isinstance(module, AlibiBias)
    slopes: NDArray[np.float32] = module.slopes.numpy()
    return slopes


def t5_borders(config: T5Config) -> list[int]:
    """Return the least distance of each bucket of a direction but the first."""
    from preblock.models.modules.bias_modules import T5RelativeBias, build_bias

    module = build_bias(config)
    assert isinstance(module, T5RelativeBias)
    return module.borders()


def relative_frequencies(width: int) -> NDArray[np.float32]:
    """Return the D/2 frequencies of relative sinusoids, float32."""
    from preblock.models.modules.relative_positions import RelativeSinusoid

    frequencies: NDArray[np.float32] = RelativeSinusoid(width).frequencies.numpy()
    return frequencies
