"""The modules of pairwise attention biases, built from their configurations."""

from preblock.models.modules.alibi import AlibiBias
from preblock.models.modules.bias import AlibiConfig, BiasConfig, RelativeSinusoidConfig, T5Config
from preblock.models.modules.relative_positions import RelativeSinusoid, T5RelativeBias

Bias = AlibiBias | T5RelativeBias | RelativeSinusoid


def build_bias(config: BiasConfig) -> Bias:
    """Return the module of `config`.

    Raises:
        ValueError: the module does not allow a value.

    """
    match config:
        case AlibiConfig():
            return AlibiBias(config.heads, config.anchor, config.recipe, config.arithmetic, config.divisor)
        case T5Config():
            return T5RelativeBias(config.heads, config.buckets, config.max_distance, config.bidirectional)
        case RelativeSinusoidConfig():
            return RelativeSinusoid(config.width, config.clamp_len, config.bidirectional)
