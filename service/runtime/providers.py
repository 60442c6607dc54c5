"""Chooses the onnxruntime provider."""

from typing import Literal, NamedTuple

import numpy as np
import onnxruntime as ort

from preblock.service.artifacts.manifest import Artifact, Manifest
from preblock.service.core.errors import Forbidden, ProviderError
from preblock.service.runtime.cuda_driver import load_driver

VERSION: str = ort.__version__
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
PROBE = (
    b'\x08\n:9\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x14"
)
"""The smallest ONNX model: y = x + x, float32 (1,)."""


class ProviderChoice(NamedTuple):
    """The provider of the models, and the reason.

    Args:
        requested: auto, cpu or cuda.
        active: onnxruntime name of the provider in use; `for_model` returns exceptions.
        probed: name of the provider after a successful probe of CUDA; else None.
        reason: why CUDA is not in use; None if it is, or was not requested.

    """

    requested: str
    active: str
    probed: str | None
    reason: str | None

    def for_model(self, manifest: Artifact) -> "ProviderChoice":
        """Return the provider of a model.

        With `auto`, the CPU keeps a model whose rows are exact there: it gives a vector the same bits in any call, and
        answers small requests sooner than a GPU. The norms of a GPU depend on the shape of the call (docs/gpu.md).
        """
        exact = isinstance(manifest, Manifest) and manifest.exact_rows
        if self.requested == "auto" and self.active != CPU and exact:
            reason = "the model has no matrix product, and the CPU gives a vector the same bits in any call"
            return self._replace(active=CPU, reason=reason)
        return self


ON_CPU = ProviderChoice(CPU, CPU, None, None)


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
        load_driver()
    except Forbidden as error:
        return error.got
    # The loader does not search pip's folders of the CUDA and cuDNN libraries.
    ort.preload_dlls()
    probe = ort.InferenceSession(PROBE, providers=[CUDA, CPU])
    if probe.get_providers()[0] != CUDA:
        return "onnxruntime could not start it, and wrote on standard error why"
    probe.run(None, {"x": np.ones(1, np.float32)})
    return None
