"""Places that tests use."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREBLOCK = str(Path(sys.executable).parent / "preblock")
"""The console script of this environment."""
