"""Libraries that some tests compare with. They are imported at their first use; a test is skipped without them.

The tested packages need none of them, and torch alone takes seconds.
"""

from typing import Any

import pytest


class _Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(pytest.importorskip(self._name), name)


torch: Any = _Late("torch")
safetensors_torch: Any = _Late("safetensors.torch")
transformers: Any = _Late("transformers")
exporter: Any = _Late("preblock.export.exporter")
own_modules: Any = _Late("preblock.export.own_modules.module")
presets: Any = _Late("preblock.models.presets")
make_artifacts: Any = _Late("tests.data.make_artifacts")
library_models: Any = _Late("tests.families.library_models")
