"""Metadata, configuration and statistics documents of the Open Inference Protocol, for HTTP and gRPC.

Sources: KServe, "Open Inference Protocol", version 2; Triton, extensions "Model configuration", "Statistics", "Model
repository", "Sequence", "System shared memory" and "CUDA shared memory".
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from preblock.service.artifacts.manifest import Manifest, StemManifest, Tensor
from preblock.service.artifacts.names import BIAS_GRAPH, CONTEXT, GRAPH, TOKENIZER
from preblock.service.codecs.fields import read_flag
from preblock.service.core.errors import Invalid
from preblock.service.observability.metrics import INFER, INPUT, OUTPUT, QUEUE, Duration, InferenceStatistics
from preblock.service.runtime.model import ServedModel
from preblock.service.runtime.repository import VersionState

PLATFORM = "onnx_onnxv1"
EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "sequence",
    "sequence(string_id)",
    "statistics",
)
SHARED_MEMORY_EXTENSION, CUDA_SHARED_MEMORY_EXTENSION = "system_shared_memory", "cuda_shared_memory"
DATATYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "int64": "INT64", "float8_e4m3fn": "UINT8"}
"""Datatype of each dtype. The protocol has no FP8, so its numbers are sent as bytes."""
TEXT = "text"
"""The input of a model with a tokenizer, instead of `input_ids`."""
PARTS, VECTORS = "parts", "vectors"
"""The inputs of rows made of parts: the rows in JSON, and the vectors of a placeholder."""
UNDECLARED_INPUTS = ("position_ids", PARTS, VECTORS)
"""Inputs that exclude declared ones. perf_analyzer fills every declared input."""

Manifests = Manifest | StemManifest
Shapes = Mapping[str, tuple[str, list[int]]]
"""Datatype and shape of tensors, by name; free sizes are -1."""


@lru_cache
def describe_inputs(manifest: Manifests) -> Shapes:
    """Return datatype and shape of every input by name, declared or not."""
    if isinstance(manifest, StemManifest):
        return describe_tensors((manifest.input,))
    rows = dict.fromkeys(("input_ids", *manifest.indices, "attention_mask", "position_ids"), ("INT64", [-1, -1]))
    text = {TEXT: ("BYTES", [-1])} if TOKENIZER in manifest.files else {}
    bias = manifest.graphs[BIAS_GRAPH].inputs if manifest.bias else ()
    history = {CONTEXT: ("INT64", [-1, manifest.history.tokens])} if manifest.history else {}
    parts = {PARTS: ("BYTES", [-1])}
    if manifest.token_embeddings is not None:
        parts[VECTORS] = ("FP32", [-1, manifest.token_embeddings.width])
    return rows | {"offset": ("INT64", [-1])} | history | text | parts | describe_tensors(bias)


def declared_inputs(manifest: Manifests) -> Shapes:
    """Return datatype and shape of the inputs that metadata and configuration list, by name."""
    return {name: tensor for name, tensor in describe_inputs(manifest).items() if name not in UNDECLARED_INPUTS}


def required_inputs(manifest: Manifests) -> tuple[str, ...]:
    """Return the names of the inputs that every request needs."""
    if isinstance(manifest, StemManifest):
        return (manifest.input.name,)
    # A text or the lengths of a bias replace all token inputs.
    return () if TOKENIZER in manifest.files or manifest.bias else ("input_ids", *manifest.needed)


@lru_cache
def describe_outputs(manifest: Manifests) -> Shapes:
    """Return datatype and shape of every output by name, `embeddings` first."""
    if isinstance(manifest, StemManifest):
        return describe_tensors(manifest.graphs[GRAPH].outputs)
    types = {name: DATATYPES[manifest.dtype_of(name, "float32")] for name in manifest.shapes}
    tokens = {name: (types[name], [-1, -1, *shape]) for name, shape in manifest.shapes.items()}
    return tokens | describe_tensors((manifest.bias,) if manifest.bias else ())


def default_outputs(manifest: Manifests) -> tuple[str, ...]:
    """Return the outputs of a request that names none: all but the bias, because the bias has no tokens."""
    return tuple(describe_outputs(manifest) if isinstance(manifest, StemManifest) else manifest.widths)


def describe_tensors(tensors: Iterable[Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Return datatype and shape of tensors by name; free sizes are -1."""
    return {
        tensor.name: (DATATYPES[tensor.dtype], [size if isinstance(size, int) else -1 for size in tensor.shape])
        for tensor in tensors
    }


def server_metadata(version: str, shared_memory: Iterable[str]) -> dict[str, Any]:
    """Return name, version and extensions of the server; `shared_memory` names its extensions of shared memory."""
    return {"name": "preblock", "version": version, "extensions": (*EXTENSIONS, *shared_memory)}


def model_metadata(name: str, versions: list[int], manifest: Manifests) -> dict[str, Any]:
    """Return the metadata of a model."""
    return {
        "name": name,
        "versions": [str(version) for version in versions],
        "platform": PLATFORM,
        **{
            side: [{"name": tensor, "datatype": datatype, "shape": shape} for tensor, (datatype, shape) in all_.items()]
            for side, all_ in (("inputs", declared_inputs(manifest)), ("outputs", describe_outputs(manifest)))
        },
    }


def model_config(name: str, manifest: Manifests, provider: str) -> dict[str, Any]:
    """Return the configuration of a model in the format of Triton; the batch is an ordinary dimension."""
    kind = "KIND_CPU" if provider == "CPUExecutionProvider" else "KIND_GPU"
    required = required_inputs(manifest)
    return {
        "name": name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "version_policy": {"all": {}},
        "max_batch_size": 0,
        "input": [
            {
                "name": tensor,
                "data_type": "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}",
                "dims": shape,
                "optional": tensor not in required,
            }
            for tensor, (datatype, shape) in declared_inputs(manifest).items()
        ],
        "output": [
            {"name": tensor, "data_type": f"TYPE_{datatype}", "dims": shape}
            for tensor, (datatype, shape) in describe_outputs(manifest).items()
        ],
        "instance_group": [{"name": name, "kind": kind, "count": 1}],
        "default_model_filename": GRAPH,
        "model_transaction_policy": {"decoupled": False},
    }


def statistics_of(
    models: Iterable[ServedModel], name: str | None, statistics: Mapping[tuple[str, int], InferenceStatistics]
) -> dict[str, Any]:
    """Return the statistics of models; `name` is the requested one, which may be an alias."""
    found = [model_statistics(name or m.name, m.version, statistics[m.name, m.version]) for m in models]
    return {"model_stats": found}


def model_statistics(name: str, version: int, statistics: InferenceStatistics) -> dict[str, Any]:
    """Return the statistics of a version of a model in the format of Triton; an inference is one row."""
    by_rows, whole = statistics.stages, {phase: Duration() for phase in (QUEUE, INPUT, INFER, OUTPUT)}
    for (_, phase), duration in by_rows.items():
        whole[phase].count += duration.count
        whole[phase].seconds += duration.seconds
    executions = sum(duration.count for (rows, phase), duration in by_rows.items() if phase == INFER and rows != 0)
    sizes = sorted({rows for rows, _ in by_rows if rows})
    never = _duration(Duration())
    return {
        "name": name,
        "version": str(version),
        "last_inference": round(statistics.last * 1000),
        "inference_count": statistics.rows,
        "execution_count": executions,
        "inference_stats": {
            "success": _duration(statistics.outcomes["success"]),
            "fail": _duration(statistics.outcomes["fail"]),
            **{phase: _duration(duration) for phase, duration in whole.items()},
            "cache_hit": never,
            "cache_miss": never,
        },
        "response_stats": {},
        "batch_stats": [
            {"batch_size": size, **{phase: _duration(by_rows[size, phase]) for phase in (INPUT, INFER, OUTPUT)}}
            for size in sizes
        ],
        "memory_usage": [],
    }


def repository_index(versions: Iterable[VersionState], only_ready: bool) -> list[dict[str, str]]:
    """Return every version, or every ready version, of every model with name, version, state and reason."""
    return [
        asdict(version) | {"version": str(version.version)}
        for version in versions
        if version.state == "READY" or not only_ready
    ]


def check_change(verb: str, parameters: Mapping[str, Any]) -> None:
    """Check the parameters of a request to "load" or "unload" a model.

    Raises:
        Invalid: an unknown parameter or value.

    """
    known = ("unload_dependents",) if verb == "unload" else ()
    for name, value in parameters.items():
        if name not in known:
            raise Invalid("parameters", name, ", ".join(known) or "none, because files alone define a model")
        read_flag(f"parameters.{name}", value)  # either changes nothing, since no model has a dependent


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": round(duration.seconds * 1e9)}
