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

_MODULES = {
    "AlibiBias": "modules.alibi",
    "AudioConfig": "modules.stems",
    "AudioStem": "modules.stems",
    "BertEmbeddings": "embeddings",
    "FactorisedGridEncoding": "modules.grid",
    "FrontEnd": "frontend",
    "FrontEndConfig": "config",
    "GPT2Embeddings": "embeddings",
    "GridEmbedding": "embeddings",
    "HierarchicalEmbedding": "embeddings",
    "HierarchicalPositionalEncoding": "modules.hierarchical_positions",
    "HybridEmbedding": "embeddings",
    "HybridPositionalEncoding": "modules.hybrid_positions",
    "LearnedGridEncoding": "modules.grid",
    "LearnedPositionalEncoding": "modules.positions",
    "PatchConfig": "modules.stems",
    "PatchStem": "modules.stems",
    "RelativeSinusoid": "modules.relative_positions",
    "RotaryConfig": "modules.rotary_config",
    "RotaryEmbedding": "modules.rotary_embedding",
    "SinusoidalGridEncoding": "modules.grid",
    "SinusoidalPositionalEncoding": "modules.positions",
    "T5RelativeBias": "modules.relative_positions",
    "TokenEmbedding": "modules.tokens",
    "TransformerEmbedding": "embeddings",
    "rotate": "modules.rotary_embedding",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a class on first use: `import preblock.models.steps` imports no unused torch module."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name not in ("FrontEndConfig", "RotaryConfig"):  # plain values
            import_torch(f"preblock.models.{name}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
