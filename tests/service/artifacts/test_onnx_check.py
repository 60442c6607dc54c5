"""Artifacts with one broken rule of `docs/artifact.md` each. Oracles: the onnx package, hashlib."""

import json
import shutil
from collections.abc import Callable
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


INPUTS = [{"name": "input_ids", "dtype": "int64", "shape": ["batch"]}]
GPT = "gpt-100x32x50"
SEGMENTS = f"expected 2, the rows of {GRAPH} segments.weight"
DISAGREEING: list[tuple[str, dict[str, Any], str]] = [
    (GPT, {"vocab_size": 101}, f"vocab_size: got 101, expected 100, the rows of {TOKENS}"),
    (GPT, {"vocab_size": 99}, f"vocab_size: got 99, expected 100, the rows of {TOKENS}"),
    (GPT, {"front_end": None, "vocab_size": 101}, f"vocab_size: got 101, expected 100, the rows of {TOKENS}"),
    (GPT, {"front_end": None, "max_len": 51}, f"max_len: got 51, expected at most the rows of {GRAPH} (["),
    (GPT, {"max_len": 51}, f"max_len: got 51, expected at most the rows of {GRAPH} (["),
    (GPT, {"width": 33}, "width: got 33, expected 32, the width of embeddings"),
    (GPT, {"indices": {"token_type_ids": 2}}, f"indices: got token_type_ids, expected inputs of {GRAPH}"),
    (GPT, {"token_embeddings": LOOKUP}, "token_embeddings.width: got 16, expected 32, the width of token_embeddings"),
    (GPT, {"files": {}}, f"files does not list {GRAPH}, {DATA}, {TOKEN_GRAPH}"),
    (GPT, {"graphs": {}}, f"graphs: got nothing, expected at least {GRAPH}"),
    (GPT, {"graphs": {GRAPH: {"inputs": INPUTS, "outputs": []}}}, f"graphs.{GRAPH}.inputs: got input_ids int64 ["),
    ("gpt", {"indices": {"input_ids": 7}}, "indices: got input_ids, expected names of further inputs"),
    *(("bert", {"indices": {"token_type_ids": n}}, f"indices.token_type_ids: got {n}, {SEGMENTS}") for n in (1, 3)),
    ("ngrams", {"history": None}, "history.tokens: got nothing"),
    ("ngrams", {"history": {"tokens": 3, "reset_id": 2}}, "history.tokens: got {'ngram.ids.onnx': 3, "),
    ("ngrams", {"history": {"tokens": 2, "reset_id": 99}}, "history.reset_id: got 99"),
    ("ngrams", {"history": {"tokens": 10**12, "reset_id": 2}}, "history.tokens: got 1000000000000, expected at"),
    ("llama", {"max_len": 2**62 + 1}, f"max_len: got {2**62 + 1}, expected at most {2**62}"),
]


@pytest.mark.parametrize(("artifact", "values", "message"), DISAGREEING, ids=range(len(DISAGREEING)))
def test_manifest_disagreeing_with_graph_is_rejected(
    tmp_path: Path, artifact: str, values: dict[str, Any], message: str
) -> None:
    folder = copy_artifact(artifact, tmp_path, "gpt")
    seal(folder, **values)
    assert refusal(folder).startswith(f"{MANIFEST} {message}")


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


def within(message: Any, seen: set[str]) -> set[str]:
    """Return the names of a message and of the messages of its fields, at any depth."""
    if message.name not in seen:
        seen.add(message.name)
        for field in message.fields:
            if field.message_type is not None:
                within(field.message_type, seen)
    return seen


def test_onnx_subset_has_every_field_with_tensors() -> None:
    for name, ours in onnx_subset_pb2.DESCRIPTOR.message_types_by_name.items():
        theirs = getattr(onnx, name).DESCRIPTOR
        assert {*ours.fields_by_name} <= {*theirs.fields_by_name}
        for field in theirs.fields:
            mine, message = ours.fields_by_name.get(field.name), field.message_type
            if mine is None:
                assert message is None or "TensorProto" not in within(message, set()), (name, field.name)
                continue
            assert (mine.number, mine.type, mine.is_repeated) == (field.number, field.type, field.is_repeated)
            assert (mine.message_type and mine.message_type.name) == (message and message.name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tables: tables.pop(), "ngram_tables: got 1, expected 2, as ngram.ids.onnx has"),
        (
            change_table(width=32),
            "ngram_tables.0: got 240 rows of 32 float32 from byte 1584, expected a table of ngrams.onnx",
        ),
        (change_part(begin=10**9), "ngram_tables.0: got 240 rows of 16 float32 from byte 1000000000, expected a table"),
        (change_part(begin=-1), "ngram_tables.0.parts.0.begin: got -1, expected"),
        (change_part(rows=241), "ngram_tables.0.parts: got "),
        (change_part(file="/etc/passwd"), "ngram_tables.0.parts: got "),
    ],
)
def test_table_inconsistent_with_graph_is_rejected(
    change: Callable[[list[dict[str, Any]]], object], message: str, tmp_path: Path
) -> None:
    edit_manifest(copy_artifact("ngrams", tmp_path), lambda manifest: change(manifest["ngram_tables"]))
    with pytest.raises(ArtifactError) as refused:
        Repository(tmp_path)
    assert str(refused.value).startswith(f"ngrams/1/{MANIFEST} {message}")
