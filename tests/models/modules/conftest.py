"""Some of these tests export."""

from tests.support.exports import translations  # noqa: F401
