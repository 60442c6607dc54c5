"""The manifests of tiny models, where no artifact is needed."""

from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.names import MANIFEST
from tests.support.artifacts import STORED


def tiny_manifest() -> Manifest:
    """Return one of 11 ids, 8 positions and vectors of width 4."""
    return Manifest.model_validate_json((STORED / "bert" / MANIFEST).read_bytes())


def tiny_stem() -> StemManifest:
    """Return one of images of one channel, 4 by 4 or other multiples of 2, and vectors of width 4."""
    return StemManifest.model_validate_json((STORED / "vit-gray" / MANIFEST).read_bytes())
