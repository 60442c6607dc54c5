"""Chooses the onnxruntime provider."""

import ctypes
from typing import Literal, NamedTuple

import numpy as np
import onnxruntime as ort

from preblock.service.core.errors import ProviderError

VERSION: str = ort.__version__
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
PROBE = (
    b'\x08\n:9\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x14"
)
"""The smallest ONNX model: y = x + x, float32 (1,)."""


class ProviderChoice(NamedTuple):
    """The provider of all models, and the reason.

    Args:
        requested: auto, cpu or cuda.
        active: onnxruntime name of the sessions' provider.
        probed: name of the provider after a successful probe of CUDA; else None.
        reason: why the probe of CUDA failed; None if it was not tried or ran.

    """

    requested: str
    active: str
    probed: str | None
    reason: str | None


def choose_provider(requested: Literal["auto", "cpu", "cuda"]) -> ProviderChoice:
    """Return the provider to use: CUDA if it works, unless the CPU was requested.

    Raises:
        ProviderError: CUDA was requested and cannot be used; the error gives the reason.

    """
    if requested == "cpu":
        return ProviderChoice(requested, CPU, None, None)
    reason = cuda_unavailable_reason()
    if reason is None:
        return ProviderChoice(requested, CUDA, CUDA, None)
    if requested == "cuda":
        raise ProviderError("provider", "cuda", "auto or cpu", message=f"provider cuda cannot be used: {reason}")
    return ProviderChoice(requested, CPU, None, reason)


def cuda_unavailable_reason() -> str | None:
    """Return why CUDA cannot be used, or None if a session ran on it.

    onnxruntime itself falls back to the CPU without an exception.
    """
    if CUDA not in ort.get_available_providers():
        return "this onnxruntime has no CUDA: install preblock[gpu] in place of preblock[cpu]"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: libcuda.so.1 was not found"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no GPU"
    # The loader does not search pip's folders of the CUDA and cuDNN libraries.
    ort.preload_dlls()
    probe = ort.InferenceSession(PROBE, providers=[CUDA, CPU])
    if probe.get_providers()[0] != CUDA:
        return "onnxruntime could not start it, and wrote on standard error why"
    probe.run(None, {"x": np.ones(1, np.float32)})
    return None
