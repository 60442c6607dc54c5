"""The manifests of tiny models, where no artifact is needed."""

from preblock.service.artifacts.manifest import Graph, Manifest, Rotary, Source, StemManifest, Tensor, TokenEmbeddings

OUTPUTS = {"model.onnx": "embeddings", "token.onnx": "token_embeddings"}


def tiny_manifest(segments: int = 2, rotary: tuple[Rotary, ...] = ()) -> Manifest:
    """Return one of 11 ids, 8 positions and vectors of width 4."""
    return Manifest(
        family="bert",
        vocab_size=11,
        width=4,
        max_len=8,
        indices={"token_type_ids": segments} if segments else {},
        needed=(),
        counts="slots",
        padding_id=None,
        refused_ids=(),
        dtype="float32",
        graphs={
            graph: Graph(inputs=(), outputs=(Tensor(name=name, dtype="float32", shape=("batch", "length", 4)),))
            for graph, name in OUTPUTS.items()
        },
        token_embeddings=TokenEmbeddings(output="token_embeddings", width=4, embedding_scale=1.0, scaled=False),
        rotary=rotary,
        resized=None,
        front_end={},
        files={},
        source=Source(kind="module"),
        versions={},
    )


def tiny_stem() -> StemManifest:
    """Return one of images of one channel, 4 by 4 or other multiples of 2, and vectors of width 4."""
    vectors = Tensor(name="embeddings", dtype="float32", shape=("batch", "tokens", 4))
    return StemManifest(
        family="vit",
        width=4,
        dtype="float32",
        input=Tensor(name="pixel_values", dtype="float32", shape=("batch", 1, "height", "width")),
        tokens=None,
        image_size=4,
        patch_size=2,
        graphs={"model.onnx": Graph(inputs=(), outputs=(vectors,))},
        front_end={},
        files={},
        source=Source(kind="module"),
        versions={},
    )
