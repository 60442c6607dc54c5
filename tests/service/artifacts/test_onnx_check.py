"""Artifacts with one broken rule of `docs/artifact.md` each. Oracles: the onnx package, hashlib."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper

from preblock.service.artifacts import onnx_subset_pb2
from preblock.service.artifacts.names import BIAS_GRAPH, DATA, GRAPH, MANIFEST, TOKEN_GRAPH
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.repository import Repository
from tests.service.artifacts.broken_artifacts import (
    TOKENS,
    change_part,
    change_table,
    edit,
    external,
    refusal,
    seal,
)
from tests.support.artifacts import copy_artifact
from tests.support.paths import ROOT
from tests.support.references import edit_manifest


def test_failing_graph_is_rejected_and_logged(weighty_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """onnxruntime opens the graph, and its first run fails."""

    def change(model: onnx.ModelProto) -> None:
        gather = next(node for node in model.graph.node if node.op_type == "Gather" and node.input[1] == "input_ids")
        gather.input[1] = "far"
        model.graph.initializer.add(name="much", data_type=7, int64_data=[10**6])
        model.graph.node.insert(0, onnx.helper.make_node("Add", ["input_ids", "much"], ["far"]))

    add_graph(weighty_copy, BIAS_GRAPH)
    edit(weighty_copy, change, BIAS_GRAPH)
    assert refusal(weighty_copy) == "manifest.json: the artifact cannot be opened; see the log"
    assert "gpt/1 cannot be opened" in caplog.text
    assert "indices element out of data bounds" in caplog.text


def add_graph(folder: Path, name: str) -> None:
    """Add a copy of `model.onnx` as another graph, whose tables only its first run checks."""
    shutil.copy(folder / GRAPH, folder / name)
    manifest = json.loads((folder / MANIFEST).read_text())
    for field in ("graphs", "files"):
        manifest[field][name] = manifest[field][GRAPH]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def node_with(field: str, value: Any) -> onnx.NodeProto:
    """Return a node with `value` as an attribute."""
    node = onnx.NodeProto(op_type="Constant", output=["c"])
    attribute = node.attribute.add(name="value")
    held = getattr(attribute, field)
    held.append(value) if hasattr(held, "append") else held.CopyFrom(value)
    return node


LOOKUP = {"output": "token_embeddings", "width": 16, "embedding_scale": 1.0, "scaled": False}


def sparse() -> onnx.SparseTensorProto:
    values = TensorProto(name="thin", data_type=1, dims=[1], raw_data=bytes(4))
    indices = TensorProto(data_type=7, dims=[1], int64_data=[0])
    return onnx.SparseTensorProto(values=values, indices=indices, dims=[2**40])


def add_node(node: onnx.NodeProto) -> Callable[[onnx.ModelProto], object]:
    return lambda model: model.graph.node.append(node)


INNER = onnx.GraphProto(name="inner", initializer=[external()])
HIDDEN = f" hidden location: got /etc/passwd, expected {DATA}, in the same folder"
THIN = " thin: got a sparse tensor, expected a dense one"
FORBIDDEN: list[tuple[Callable[[onnx.ModelProto], object], str]] = [
    (lambda model: model.graph.initializer.append(external()), HIDDEN),
    (add_node(node_with("t", external())), HIDDEN),
    (add_node(node_with("tensors", external())), HIDDEN),
    (lambda model: model.graph.sparse_initializer.append(sparse()), THIN),
    (add_node(node_with("sparse_tensor", sparse())), THIN),
    (add_node(node_with("sparse_tensors", sparse())), THIN),
    (add_node(node_with("g", INNER)), " node Constant: got "),
    (add_node(node_with("graphs", INNER)), " node Constant: got "),
    (lambda model: model.functions.add(name="f"), ": got "),
    (lambda model: model.training_info.add().initialization.CopyFrom(INNER), ": got "),
    (add_node(helper.make_node("Det", ["a"], ["b"])), " node Det: got "),
    (add_node(helper.make_node("Add", ["a"], ["b"], domain="x")), " node Add: got "),
]


@pytest.mark.parametrize(("change", "message"), FORBIDDEN, ids=range(len(FORBIDDEN)))
def test_graph_with_forbidden_content_is_rejected(
    weighty_copy: Path, change: Callable[[onnx.ModelProto], object], message: str
) -> None:
    edit(weighty_copy, change)
    assert refusal(weighty_copy).startswith(GRAPH + message)


def test_file_without_onnx_graph_is_rejected(weighty_copy: Path) -> None:
    for content in (b"", b"no graph", b"\xff" * 100, b"\x3a\x05", b"\x08\x0a"):
        (weighty_copy / TOKEN_GRAPH).write_bytes(content)
        seal(weighty_copy)
        assert refusal(weighty_copy).startswith(f"{TOKEN_GRAPH} is no ONNX model: "), content


def varint(number: int) -> bytes:
    encoded = b""
    while number > 127:
        encoded += bytes([number % 128 + 128])
        number //= 128
    return encoded + bytes([number])


def written(number: int, content: bytes) -> bytes:
    """A field of bytes, text or a message, as protocol buffers write it."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def append_graph(folder: Path, content: bytes) -> None:
    """Append the field `graph` once more: its content is merged with the first one's."""
    with (folder / GRAPH).open("ab") as file:
        file.write(written(onnx.ModelProto.GRAPH_FIELD_NUMBER, content))
    seal(folder)


def test_deeply_nested_graphs_are_rejected(weighty_copy: Path) -> None:
    attribute, node = onnx.NodeProto.ATTRIBUTE_FIELD_NUMBER, onnx.GraphProto.NODE_FIELD_NUMBER
    inner = b""
    for _ in range(2000):
        for number in (AttributeProto.G_FIELD_NUMBER, attribute, node):
            inner = written(number, inner)
    append_graph(weighty_copy, inner)
    assert refusal(weighty_copy).startswith(f"{GRAPH} is no ONNX model: ")


@pytest.mark.parametrize("name", [b"caf\xe9", b"\xff\xff", b"a\nb", b"x" * 10**6])
def test_invalid_tensor_name_keeps_error_message_short(weighty_copy: Path, name: bytes) -> None:
    tensor = external("").SerializeToString() + written(TensorProto.NAME_FIELD_NUMBER, name)
    append_graph(weighty_copy, written(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, tensor))
    message = refusal(weighty_copy)
    assert message.startswith(GRAPH)
    assert len(message) < 500


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 101}, f"vocab_size: got 101, expected 100, the rows of {TOKENS}"),
        ({"vocab_size": 99}, f"vocab_size: got 99, expected 100, the rows of {TOKENS}"),
        ({"front_end": None, "vocab_size": 101}, f"vocab_size: got 101, expected 100, the rows of {TOKENS}"),
        ({"front_end": None, "max_len": 51}, f"max_len: got 51, expected at most the rows of {GRAPH} (["),
        ({"max_len": 51}, f"max_len: got 51, expected at most the rows of {GRAPH} (["),
        ({"width": 33}, "width: got 33, expected 32, the width of embeddings"),
        ({"indices": {"token_type_ids": 2}}, f"indices: got token_type_ids, expected inputs of {GRAPH}"),
        ({"token_embeddings": LOOKUP}, "token_embeddings.width: got 16, expected 32, the width of token_embeddings"),
        ({"files": {}}, f"files does not list {GRAPH}, {DATA}, {TOKEN_GRAPH}"),
        ({"graphs": {}}, f"graphs: got nothing, expected at least {GRAPH}"),
    ],
    ids=range(10),
)
def test_manifest_disagreeing_with_graph_is_rejected(weighty_copy: Path, values: dict[str, Any], message: str) -> None:
    seal(weighty_copy, **values)
    assert refusal(weighty_copy).startswith(f"{MANIFEST} {message}")


@pytest.mark.parametrize("segments", [1, 3])
def test_segment_count_not_matching_table_is_rejected(bert_copy: Path, segments: int) -> None:
    seal(bert_copy, indices={"token_type_ids": segments})
    table = f"{GRAPH} segments.weight"
    assert refusal(bert_copy) == f"{MANIFEST} indices.token_type_ids: got {segments}, expected 2, the rows of {table}"


def test_custom_module_may_have_unused_rows(weighty_copy: Path) -> None:
    seal(weighty_copy, front_end=None, vocab_size=99)
    assert Repository(weighty_copy.parent.parent).get("gpt").manifest.vocab_size == 99


def test_unknown_graph_input_is_rejected(weighty_copy: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info("strange", TensorProto.INT64, ["batch"]))

    edit(weighty_copy, change)
    manifest = json.loads((weighty_copy / MANIFEST).read_text())
    manifest["graphs"][GRAPH]["inputs"].append({"name": "strange", "dtype": "int64", "shape": ["batch"]})
    seal(weighty_copy, graphs=manifest["graphs"])
    assert refusal(weighty_copy) == f"{GRAPH} inputs: got strange, expected attention_mask, input_ids, offset"


def paths(ours: Any, theirs: Any, seen: set[str]) -> Iterator[str]:
    """Yield fields on a path to a tensor in `theirs` without an equal in `ours`."""
    if theirs.full_name in seen:
        return
    seen.add(theirs.full_name)
    for field in theirs.fields:
        if field.message_type is None or not leads_to_tensor(field.message_type, set()):
            continue
        mine = ours.fields_by_name.get(field.name)
        if mine is None or mine.message_type is None or (mine.number, mine.type) != (field.number, field.type):
            yield f"{theirs.name}.{field.name}"
        else:
            yield from paths(mine.message_type, field.message_type, seen)


def leads_to_tensor(message: Any, seen: set[str]) -> bool:
    if message.name == "TensorProto":
        return True
    if message.full_name in seen:
        return False
    seen.add(message.full_name)
    return any(leads_to_tensor(field.message_type, seen) for field in message.fields if field.message_type)


def test_onnx_subset_covers_every_path_to_a_tensor() -> None:
    assert list(paths(onnx_subset_pb2.ModelProto.DESCRIPTOR, onnx.ModelProto.DESCRIPTOR, set())) == []


def test_onnx_subset_fields_match_onnx() -> None:
    for name, ours in onnx_subset_pb2.DESCRIPTOR.message_types_by_name.items():
        theirs = getattr(onnx, name).DESCRIPTOR
        for field in ours.fields:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)


def test_generated_onnx_module_is_current(tmp_path: Path) -> None:
    proto = "preblock/service/artifacts/onnx_subset.proto"
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, proto], check=True, cwd=ROOT)
    written = {file.name: file.read_bytes() for file in (tmp_path / proto).parent.iterdir()}
    assert sorted(written) == ["onnx_subset_pb2.py", "onnx_subset_pb2.pyi"]
    assert written == {name: (ROOT / "service" / "artifacts" / name).read_bytes() for name in written}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tables: tables.pop(), "ngram_tables: got 1, expected 2, as ngram.ids.onnx has"),
        (
            change_table(width=32),
            "ngram_tables.0: got 240 rows of 32 float32 from byte 1584, expected a table of ngrams.onnx",
        ),
        (change_table(dtype="float16"), "ngram_tables.0: got 240 rows of 16 float16 from byte 1584, expected a table"),
        (change_part(begin=10**9), "ngram_tables.0: got 240 rows of 16 float32 from byte 1000000000, expected a table"),
        (change_part(begin=-1), "ngram_tables.0.parts.0.begin: got -1, expected"),
        (change_part(rows=241), "ngram_tables.0.parts: got "),
        (change_part(file="/etc/passwd"), "ngram_tables.0.parts: got "),
        (change_table(parts=[]), "ngram_tables.0.parts: got (), expected one part of 240 rows in model.onnx.data"),
    ],
)
def test_table_inconsistent_with_graph_is_rejected(
    change: Callable[[list[dict[str, Any]]], object], message: str, tmp_path: Path
) -> None:
    edit_manifest(copy_artifact("ngrams", tmp_path), lambda manifest: change(manifest["ngram_tables"]))
    with pytest.raises(ArtifactError) as refused:
        Repository(tmp_path)
    assert str(refused.value).startswith(f"ngrams/1/{MANIFEST} {message}")
