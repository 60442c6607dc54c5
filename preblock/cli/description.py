"""Descriptions of an artifact in one line."""

from typing import Any


def describe_limits(manifest: Any) -> str:
    """Return the family, the legal inputs and the width of a model in one line."""
    if manifest.kind == "stem":
        return f"{manifest.family}, {manifest.input.name} {list(manifest.input.shape)}, width {manifest.width}"
    indices = "".join(f", {name} 0 to {count - 1}" for name, count in manifest.indices.items())
    return (
        f"{manifest.family}, ids 0 to {manifest.vocab_size - 1}{indices}, "
        f"max_len {manifest.max_len or 'unlimited'}, width {manifest.width}"
    )


def describe_storage(manifest: Any, report: Any) -> str:
    """Return the stored type of the tables and its error in one line."""
    return f"stored as {manifest.stored_as}: {report.storage_summary()}"
