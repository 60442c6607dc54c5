"""Places that tests use."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREBLOCK = str(Path(sys.executable).parent / "preblock")
"""The console script of this environment."""
CHECKPOINTS = Path(sys.prefix) / "checkpoints"
"""The packages of requirements/checkpoints.txt."""
