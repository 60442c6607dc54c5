"""Manifests of earlier exports, in the form of today."""

from typing import Any


def drop_tiles(content: dict[str, Any]) -> dict[str, Any]:
    """Leave out the unused `tiles.onnx`, a second graph of the same vectors."""
    if "tiles" not in content:
        return content
    content = {name: value for name, value in content.items() if name != "tiles"}
    for name in ("graphs", "files"):
        if isinstance(content.get(name), dict):
            content[name] = {file: value for file, value in content[name].items() if file != "tiles.onnx"}
    return content


def describe_scale(content: dict[str, Any]) -> dict[str, Any]:
    """Describe the embedding scale by the steps; earlier manifests have one boolean for all consumers."""
    lookup = content.get("token_embeddings")
    if not isinstance(lookup, dict) or "consumer_scales" not in lookup:
        return content
    lookup = {name: value for name, value in lookup.items() if name != "consumer_scales"}
    document = content.get("front_end")
    document = document if isinstance(document, dict) else {}
    steps = document.get("steps")
    second = steps[1] if isinstance(steps, list) and len(steps) > 1 and isinstance(steps[1], dict) else {}
    lookup["embedding_scale"] = second.get("by") if second.get("kind") == "scale" else 1.0
    lookup["scaled"] = lookup["embedding_scale"] != 1 and document.get("lookup") != 1
    return content | {"token_embeddings": lookup}
