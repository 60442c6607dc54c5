"""Build the kernels in C with the package.

The module uses the stable ABI of Python 3.11 (PEP 384): one wheel serves every later Python. Without a compiler the
wheel is pure, and onnxruntime does the work of the module. `HATCH_BUILD_NO_HOOKS=1` builds the pure wheel on purpose.
"""

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

MODULE, FOLDER = "preblock.service.runtime._kernels", Path("preblock/service/runtime")
SOURCES = ("_kernels.c", "_fused_embedding.c", "_row_means.c", "_stored_rows.c")
FILES = (*SOURCES, "_kernels.h")
# A product is rounded before it is added to, as in a graph.
ARGUMENTS = ["-O3", "-ffp-contract=off"]


class LookupHook(BuildHookInterface[Any]):
    """Builds the module beside its source, unless a newer module exists."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build the module and add it to the wheel, now specific to this platform."""
        sources = [str(FOLDER / file) for file in SOURCES]
        module = Extension(MODULE, sources, extra_compile_args=ARGUMENTS, py_limited_api=True, optional=True)
        command = build_ext(Distribution({"ext_modules": [module]}))
        command.inplace = True
        command.ensure_finalized()
        built = Path(command.get_ext_fullpath(MODULE))
        if not built.exists() or built.stat().st_mtime < max((FOLDER / file).stat().st_mtime for file in FILES):
            built.unlink(missing_ok=True)
            command.run()
        if built.exists():
            build_data["artifacts"].append(f"preblock/service/runtime/{built.name}")
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        else:
            self.app.display_warning(f"{MODULE} was not built: onnxruntime will do its work, and take longer")
