"""`preblock convert --layout triton`, read with the schema of Triton's client."""

import shutil
from pathlib import Path

import onnxruntime
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as triton

from preblock.export.layouts.triton import write_config
from preblock.service.artifacts.catalog import find_artifacts
from tests.support import commands
from tests.support.artifacts import copy_artifact


def read(file: Path) -> triton.ModelConfig:
    """Parse every field, or raise."""
    return text_format.Parse(file.read_text(encoding="utf-8"), triton.ModelConfig())


@pytest.fixture
def triton_repository(tiny_repository: Path, tmp_path: Path) -> Path:
    """Two versions of `bert`, and one of `gpt`."""
    return shutil.copytree(tiny_repository, tmp_path / "repository")


def test_converted_config_matches_triton_schema(triton_repository: Path) -> None:
    done = commands.run(commands.preblock, "convert", "bert", "--layout", "triton", "--repository", triton_repository)
    file = triton_repository / "bert" / "config.pbtxt"
    assert (done.stdout, done.stderr) == (f"{file}\n", "")
    tokens = {"data_type": triton.TYPE_INT64, "dims": [-1, -1]}
    parameters = {"family": "bert", "vocab_size": "11", "max_len": "8", "token_type_ids": "2"}
    assert read(file) == triton.ModelConfig(
        name="bert",
        platform="onnxruntime_onnx",
        default_model_filename="model.onnx",
        max_batch_size=0,
        version_policy=triton.ModelVersionPolicy(specific=triton.ModelVersionPolicy.Specific(versions=[1, 2])),
        input=[
            triton.ModelInput(name="input_ids", **tokens),
            triton.ModelInput(name="offset", data_type=triton.TYPE_INT64, dims=[-1]),
            triton.ModelInput(name="token_type_ids", **tokens),
        ],
        output=[triton.ModelOutput(name="embeddings", data_type=triton.TYPE_FP32, dims=[-1, -1, 4])],
        optimization=triton.ModelOptimizationPolicy(graph=triton.ModelOptimizationPolicy.Graph(level=-1)),
        parameters={name: triton.ModelParameter(string_value=value) for name, value in parameters.items()},
    )
    # The folder can still be served and exported into.
    assert [found[:2] for found in find_artifacts(triton_repository)] == [("bert", 1), ("bert", 2), ("gpt", 1)]
    assert sorted(entry.name for entry in (triton_repository / "bert").iterdir()) == ["1", "2", "config.pbtxt"]


def test_triton_config_lists_only_compatible_versions(triton_repository: Path) -> None:
    for longer, stored in ((3, "gpt"), (4, "gpt-50x4x9")):
        copy_artifact(stored, triton_repository, "bert")
        config = read(write_config(triton_repository / "bert"))
        assert list(config.version_policy.specific.versions) == [longer]
        assert [tensor.name for tensor in config.input] == ["input_ids", "offset"]
    (triton_repository / "bert" / ".tmp-draft").mkdir()
    shutil.copytree(triton_repository / "bert" / "3", triton_repository / "bert" / "5")
    assert list(read(write_config(triton_repository / "bert")).version_policy.specific.versions) == [3, 5]


@pytest.mark.parametrize("name", ["gpt", "rotary", "vit"])
def test_config_describes_the_graph_as_onnxruntime_does(name: str, tmp_path: Path) -> None:
    folder = copy_artifact(name, tmp_path)
    config = read(write_config(tmp_path / name))
    assert config.parameters["family"].string_value == {"gpt": "gpt2"}.get(name, name)
    session = onnxruntime.InferenceSession(folder / config.default_model_filename)
    types = {"tensor(int64)": triton.TYPE_INT64, "tensor(float)": triton.TYPE_FP32}
    for described, nodes in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in described] == [
            (node.name, types[node.type], [size if isinstance(size, int) else -1 for size in node.shape])
            for node in nodes
        ]
