"""Compile `_fused_embedding.cu` to PTX, by NVIDIA's runtime compiler: `make ptx`.

    python -m tests.support.nvrtc FOLDER

FOLDER holds the package `nvidia-cuda-nvrtc-cu12`. Needs no GPU.
"""

import ctypes
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from preblock.service.runtime.cuda_embedding import PTX

SOURCE = PTX.with_suffix(".cu")
OLDEST_GPU = "compute_50"
"""The driver compiles this PTX for every newer GPU, too."""
HEAD = "// `make ptx` wrote this file.\n// sha256 of _fused_embedding.cu: {}\n"


def main() -> None:
    """Write the PTX beside its source."""
    (library,) = Path(sys.argv[1]).glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
    source = SOURCE.read_bytes()
    code = compile_source(ctypes.CDLL(str(library)), source)
    # The compiler adds variables that no kernel uses.
    lines = [line for line in code.splitlines() if not line.startswith(("//", ".global"))]
    PTX.write_text(HEAD.format(sha256(source).hexdigest()) + "\n".join(lines).strip() + "\n")


def compile_source(library: Any, source: bytes) -> str:
    """Return PTX.

    Raises:
        SystemExit: the source has an error.

    """
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={OLDEST_GPU}".encode())
    failed = library.nvrtcCompileProgram(program, 1, options)
    kind = "ProgramLog" if failed else "PTX"
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{kind}")(program, text)
    if failed:
        raise SystemExit(text.value.decode())
    return text.value.decode()


if __name__ == "__main__":
    main()
