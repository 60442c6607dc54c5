"""Front-ends as PyTorch modules to train, and how they are read from checkpoints."""

from importlib import import_module
from typing import TYPE_CHECKING

from preblock.models.torch_import import import_torch

if TYPE_CHECKING:
    from preblock.models.config import FrontEndConfig
    from preblock.models.embeddings import (
        BertEmbeddings,
        GPT2Embeddings,
        GridEmbedding,
        HierarchicalEmbedding,
        HybridEmbedding,
        TransformerEmbedding,
    )
    from preblock.models.frontend import FrontEnd
    from preblock.models.modules.alibi import AlibiBias
    from preblock.models.modules.grid import FactorisedGridEncoding, LearnedGridEncoding, SinusoidalGridEncoding
    from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding
    from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
    from preblock.models.modules.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding
    from preblock.models.modules.relative_positions import RelativeSinusoid, T5RelativeBias
    from preblock.models.modules.rotary_config import RotaryConfig
    from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
    from preblock.models.modules.stems import AudioConfig, AudioStem, PatchConfig, PatchStem
    from preblock.models.modules.tokens import TokenEmbedding

__all__ = [
    "AlibiBias",
    "AudioConfig",
    "AudioStem",
    "BertEmbeddings",
    "FactorisedGridEncoding",
    "FrontEnd",
    "FrontEndConfig",
    "GPT2Embeddings",
    "GridEmbedding",
    "HierarchicalEmbedding",
    "HierarchicalPositionalEncoding",
    "HybridEmbedding",
    "HybridPositionalEncoding",
    "LearnedGridEncoding",
    "LearnedPositionalEncoding",
    "PatchConfig",
    "PatchStem",
    "RelativeSinusoid",
    "RotaryConfig",
    "RotaryEmbedding",
    "SinusoidalGridEncoding",
    "SinusoidalPositionalEncoding",
    "T5RelativeBias",
    "TokenEmbedding",
    "TransformerEmbedding",
    "rotate",
]

_NAMES = {
    "config": ("FrontEndConfig",),
    "embeddings": (
        "BertEmbeddings",
        "GPT2Embeddings",
        "GridEmbedding",
        "HierarchicalEmbedding",
        "HybridEmbedding",
        "TransformerEmbedding",
    ),
    "frontend": ("FrontEnd",),
    "modules.alibi": ("AlibiBias",),
    "modules.grid": ("FactorisedGridEncoding", "LearnedGridEncoding", "SinusoidalGridEncoding"),
    "modules.hierarchical_positions": ("HierarchicalPositionalEncoding",),
    "modules.hybrid_positions": ("HybridPositionalEncoding",),
    "modules.positions": ("LearnedPositionalEncoding", "SinusoidalPositionalEncoding"),
    "modules.relative_positions": ("RelativeSinusoid", "T5RelativeBias"),
    "modules.rotary_config": ("RotaryConfig",),
    "modules.rotary_embedding": ("RotaryEmbedding", "rotate"),
    "modules.stems": ("AudioConfig", "AudioStem", "PatchConfig", "PatchStem"),
    "modules.tokens": ("TokenEmbedding",),
}
"""Module -> its public names."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a class on first use: `import preblock.models.steps` imports no unused torch module."""
        module = next((module for module, names in _NAMES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name not in ("FrontEndConfig", "RotaryConfig"):  # plain values
            import_torch(f"preblock.models.{name}")
        return getattr(import_module(f"{__name__}.{module}"), name)
