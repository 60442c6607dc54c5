"""The numbers of a model that pictures show, and their readers for artifacts.

Letters: V vocabulary, P width of a row of positions, H heads, Q queries, K keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.checksums import Checksums
from preblock.service.artifacts.graphs import count_parameters
from preblock.service.artifacts.names import BIAS_GRAPH, GRAPH
from preblock.service.runtime.loader import ModelLoader
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.providers import choose_provider
from preblock.service.runtime.table_memory import TableMemory

Floats = NDArray[np.floating[Any]]

SINUSOIDS = {"exact": 0, "hybrid": 0, "pair_half": 0, "pair_interleaved": 0, "pair_half_float32": 0, "tensor2tensor": 1}
"""Tables of sinusoids by the name of their recipe, with c in the wavelengths 2 pi base^(j / (pairs - c))."""
SINUSOID_BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class PlotSource:
    """The numbers of a model for its pictures. A part that the model lacks is None or empty.

    Args:
        name: of the model, for titles and errors.
        positions: returns the rows of the positions `first` to `first + count - 1`, float (count, P).
        max_len: number of positions; None without a limit.
        tokens: returns the rows of int64 token ids (N,), float (N, D).
        vocab_size: V.
        wavelengths: wavelength of each pair of columns, in positions, by the name of the encoding; float64.
        bias: returns the attention bias of `length` queries and keys, float (H, Q, K).
        parameters: number of trained values, by the name of the table.

    """

    name: str
    positions: Callable[[int, int], Floats] | None = None
    max_len: int | None = None
    tokens: Callable[[NDArray[np.int64]], Floats] | None = None
    vocab_size: int = 0
    wavelengths: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    bias: Callable[[int], Floats] | None = None
    parameters: Mapping[str, int] = field(default_factory=dict)


def read_artifact(folder: str | Path, reference_roots: Sequence[Path] = ()) -> PlotSource:
    """Read the artifact in `folder`, `<repository>/<name>/<version>/`, without torch.

    Args:
        folder: of the version.
        reference_roots: folders of tables outside the artifact; default: none allowed.

    Raises:
        ArtifactError: the artifact is broken.

    """
    place = Path(folder).resolve()
    name = place.parent.name
    loader = ModelLoader(choice=choose_provider("cpu"), memory=TableMemory(), reference_roots=reference_roots)
    model = loader.load(name, int(place.name), place, Checksums(None))
    parameters = count_parameters(place, model.manifest, model.parity)
    if not isinstance(model, TokenModel):
        return PlotSource(name=name, parameters=parameters)
    manifest = model.manifest
    return PlotSource(
        name=name,
        positions=None if model.position_rows is None else model.position_rows.compute,
        max_len=manifest.max_len,
        tokens=None if manifest.token_embeddings is None else model.look_up,
        vocab_size=manifest.vocab_size,
        wavelengths=_read_wavelengths(model),
        bias=_read_bias(model),
        parameters=parameters,
    )


def sinusoid_wavelengths(front_end: Mapping[str, Any], width: int) -> dict[str, NDArray[np.float64]]:
    """Return the wavelengths of the sinusoids of a front-end, {} without any.

    Args:
        front_end: the document of a front-end, as in a manifest.
        width: P.

    """
    for step in front_end.get("steps", ()):
        # A grid has one sinusoid for its rows, and one for its columns.
        table = str(step.get("table"))
        if step["kind"] == "positions" and table in SINUSOIDS:
            pairs = width // 2 // (2 if step.get("grid") else 1)
            exponents = np.arange(pairs) / (pairs - SINUSOIDS[table])
            return {"positions": 2 * np.pi * SINUSOID_BASE**exponents}
    return {}


def rotary_wavelengths(cos: Floats, sin: Floats, width: int) -> NDArray[np.float64]:
    """Return the wavelengths of rotary pairs, from the outputs with cosines and with sines of position 1.

    `width` is R: the first R/2 columns of `cos` are cosines, and the last R/2 of `sin` are sines, in every form.

    A pair that does not turn has no wavelength, and is left out.
    """
    half = width // 2
    angles = np.arctan2(sin[-half:].astype(np.float64), cos[:half].astype(np.float64))
    lengths: NDArray[np.float64] = 2 * np.pi / angles[angles != 0]
    return lengths


def _read_wavelengths(model: TokenModel) -> dict[str, NDArray[np.float64]]:
    found: dict[str, NDArray[np.float64]] = {}
    if model.manifest.front_end is not None and model.position_rows is not None:
        found |= sinusoid_wavelengths(model.manifest.front_end, model.position_rows.width)
    inputs = model.manifest.graphs[GRAPH].inputs
    feeds = {tensor.name: np.ones(1 if tensor.name == "offset" else (1, 1), np.int64) for tensor in inputs}
    for rotary in model.manifest.rotary:
        outputs = model.run(feeds, tuple(dict.fromkeys((rotary.cos, rotary.sin))))
        name = rotary.cos.replace("_cos_sin", "").replace("_cos", "").replace("_", " ")
        found[name] = rotary_wavelengths(outputs[rotary.cos][0, 0], outputs[rotary.sin][0, 0], rotary.width)
    return found


def _read_bias(model: TokenModel) -> Callable[[int], Floats] | None:
    """Return the function of a pairwise bias; the rows of relative sinusoids are none."""
    if model.manifest.bias is None or len(model.manifest.bias.shape) != 4:
        return None
    session = model.sessions[BIAS_GRAPH]

    def compute(length: int) -> Floats:
        lengths = {"query_offset": 0, "query_length": length, "key_length": length}
        (bias,) = session.run({name: np.array([value]) for name, value in lengths.items()}).values()
        return bias.reshape(-1, length, length)

    return compute
