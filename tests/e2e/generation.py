"""Decoders of whole generations with served vectors, over each streaming protocol."""

import base64
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from websockets.sync.client import connect as connect_socket

import preblock
from tests.service.api.http.streaming.test_ndjson_and_sse import lines_of, receive, send
from tests.support.paths import ROOT
from tests.support.protocols import Clients

COUNT, BEAMS = 14, 3
FAMILIES = ("gpt2", "opt", "llama", "marian", "roberta")
SOURCES = torch.tensor([[4, 5, 6, 7, 0], [8, 9, 0, 1, 1], [10, 11, 12, 0, 1], [13, 0, 1, 1, 1]])
"""Sources for Marian: its decoder begins with one token, the prompt."""
PAD = 1
"""Padding id of Marian and RoBERTa, without a position of its own: RoBERTa must not generate it."""

UNTIED: dict[str, Any] = {"tie_word_embeddings": False, "init_std": 0.05}
"""Otherwise a decoder with random weights repeats its prompt."""
Vectors = NDArray[np.float32]
Ask = Callable[[dict[str, Any]], Any]


def load(path: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


example = load("examples/generate_with_transformers.py")


def tiny(family: str) -> Any:
    if family in example.BLOCKS:
        return example.tiny(family)
    torch.manual_seed(0)
    if family == "roberta":
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "max_position_embeddings": 66, "initializer_range": 0.5}
        roberta = transformers.RobertaConfig(vocab_size=97, **sizes, is_decoder=True, type_vocab_size=1)
        decoder: Any = transformers.RobertaForCausalLM(roberta)
        return decoder.eval()
    sizes = {f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "max_position_embeddings": 64}
    ids: dict[str, Any] = {
        "pad_token_id": PAD,
        "decoder_start_token_id": 2,
        "eos_token_id": 0,
        "forced_eos_token_id": None,
    }
    marian = transformers.MarianConfig(vocab_size=97, **sizes, **ids, scale_embedding=True, **UNTIED)
    translator: Any = transformers.MarianMTModel(marian)
    return translator.eval()


def prompts_of(family: str) -> list[list[int]]:
    prompts: list[list[int]] = [[2]] * len(SOURCES) if family == "marian" else example.PROMPTS
    return prompts


BLOCKS = {**example.BLOCKS, "marian": "model.decoder.layers", "roberta": "roberta.encoder.layer"}


class Decoder(example.Body):  # type: ignore[misc, name-defined]
    """A body of any family with given vectors for its first block."""

    def __init__(self, family: str, model: Any, blocks: Any) -> None:
        self.family = family
        super().__init__(model, blocks)
        self.sources = SOURCES
        if family == "marian":
            with torch.no_grad():
                self.encoded = model.get_encoder()(SOURCES, attention_mask=SOURCES != PAD)[0]

    def empty_cache(self) -> Any:
        config = self.model.config
        if self.family != "marian":
            return super().empty_cache()
        return transformers.EncoderDecoderCache(
            transformers.DynamicCache(config=config), transformers.DynamicCache(config=config)
        )

    def run(self, mask: torch.Tensor) -> Any:
        ids = torch.zeros(self._given[0].shape[:2], dtype=torch.long)
        return self.model(**self.tokens("input_ids", ids), **self.others(mask))

    def tokens(self, name: str, value: torch.Tensor) -> dict[str, Any]:
        return {f"decoder_{name}" if self.family == "marian" else name: value}

    def others(self, mask: torch.Tensor) -> dict[str, Any]:
        others: dict[str, Any] = {"cache": self.cache, "use_cache": True}
        if self.family != "marian":
            return others | {"attention_mask": mask}
        # The rows of a beam search follow each other as their prompts do.
        repeats = len(mask) // len(SOURCES)
        encoded = (self.encoded.repeat_interleave(repeats, 0),)
        return others | {"encoder_outputs": encoded, "attention_mask": (SOURCES != PAD).repeat_interleave(repeats, 0)}


class Embedder(Decoder):
    """The same with `inputs_embeds`: the model adds positions itself."""

    def __init__(self, family: str, model: Any, blocks: Any) -> None:
        super().__init__(family, model, blocks)
        self.remove()

    def run(self, mask: torch.Tensor) -> Any:
        given = self._given[0]
        others = self.others(mask)
        if self.family != "marian":
            positions = (mask.cumsum(1) - 1).clamp(0)[:, -given.shape[1] :]
            others["position_ids"] = positions + 1 + PAD if self.family == "roberta" else positions
        return self.model(**self.tokens("inputs_embeds", given), **others)


class Asked:
    """A stream of JSON messages over any protocol, with the interface of the client's stream."""

    def __init__(self, ask: Ask, offset: list[int], outputs: list[str]) -> None:
        self._ask, self.offset, self._outputs = ask, offset, outputs
        self.companions: dict[str, Vectors] = {}

    def step(self, rows: list[list[int]]) -> Vectors:
        answer = self._told(input_ids=rows)
        found = answer["outputs"] if len(self._outputs) > 1 else {self._outputs[0]: None}
        tensors = {
            name: np.frombuffer(base64.b64decode(answer[name] if part is None else part["data"]), "<f4")
            .reshape((answer if part is None else part)["shape"])
            .copy()
            for name, part in found.items()
        }
        self.companions = {name: tensors[name] for name in self._outputs[1:]}
        return tensors[self._outputs[0]]

    def rewind(self, offset: list[int]) -> None:
        self._told(rewind=offset)

    def reorder(self, rows: list[int]) -> None:
        self._told(reorder=rows)

    def _told(self, **message: Any) -> Any:
        answer = self._ask(message)
        assert "error" not in answer, answer
        self.offset = answer["next_offset"]
        return answer


class Stateless:
    """Requests with the interface of a stream: it keeps the offsets for each of them."""

    def __init__(
        self, ask: Callable[[dict[str, Any]], dict[str, Vectors]], offset: list[int], outputs: list[str]
    ) -> None:
        self._ask, self.offset, self._outputs = ask, offset, outputs
        self.companions: dict[str, Vectors] = {}

    def step(self, rows: list[list[int]]) -> Vectors:
        found = self._ask({"input_ids": rows, "offset": self.offset, "output": self._outputs})
        self.offset = [offset + len(row) for offset, row in zip(self.offset, rows, strict=True)]
        self.companions = {name: found[name] for name in self._outputs[1:]}
        return found[self._outputs[0]]

    def rewind(self, offset: list[int]) -> None:
        self.offset = offset

    def reorder(self, rows: list[int]) -> None:
        self.offset = [self.offset[row] for row in rows]


Protocol = Callable[[Clients, str, list[int], list[str]], AbstractContextManager[Any]]


def query(offset: list[int], outputs: list[str]) -> str:
    return f"offset={json.dumps(offset, separators=(',', ':'))}&output={','.join(outputs)}"


@contextmanager
def websocket_binary(clients: Clients, family: str, offset: list[int], outputs: list[str]) -> Iterator[Any]:
    """The client of this package: it sends frames, and resumes by itself."""
    with (
        preblock.connect(str(clients.http.base_url)) as client,
        client.decode(family, offset=offset, output=outputs[0], companions=outputs[1:], resume=True) as stream,
    ):
        yield stream


@contextmanager
def websocket_json(clients: Clients, family: str, offset: list[int], outputs: list[str]) -> Iterator[Any]:
    address = f"{clients.socket}/models/{family}/decode?{query(offset, outputs)}"
    with connect_socket(address, max_size=None) as socket:

        def ask(message: dict[str, Any]) -> Any:
            socket.send(json.dumps(message))
            return json.loads(socket.recv())

        yield Asked(ask, offset, outputs)


@contextmanager
def lines(clients: Clients, family: str, offset: list[int], outputs: list[str]) -> Iterator[Any]:
    with lines_of(clients, f"{family}/decode?{query(offset, outputs)}") as (connection, answer):

        def ask(message: dict[str, Any]) -> Any:
            send(connection, json.dumps(message) + "\n")
            return receive(answer)

        yield Asked(ask, offset, outputs)


@contextmanager
def events(clients: Clients, family: str, offset: list[int], outputs: list[str]) -> Iterator[Any]:
    """Known ids: a prompt, and later each step, in chunks of two tokens."""

    def ask(fields: dict[str, Any]) -> dict[str, Vectors]:
        headers = {"Accept": "text/event-stream"}
        path = f"/models/{family}/decode"
        answer = clients.http.post(path, json=fields | {"chunk": 2}, headers=headers)
        assert answer.status_code == 200, answer.text
        rows: dict[str, list[list[Vectors]]] = {name: [[] for _ in fields["input_ids"]] for name in outputs}
        parts = answer.text.split("\n\n")
        assert parts[-2].startswith("event: end\n")
        for event in parts[:-2]:
            document = json.loads(event.partition("\ndata: ")[2])
            for name in outputs:
                part = document if len(outputs) == 1 else document["outputs"][name]
                flat = np.frombuffer(base64.b64decode(part[name if len(outputs) == 1 else "data"]), "<f4")
                flat = flat.reshape(-1, part["shape"][-1])
                even = [len(flat) // len(rows[name])] * len(rows[name])
                at = np.cumsum(document.get("lengths", even))
                for row, vectors in zip(rows[name], np.split(flat, at[:-1]), strict=True):
                    row.append(vectors)
        return {name: np.concatenate([part for row in found for part in row]) for name, found in rows.items()}

    yield Stateless(ask, offset, outputs)


@contextmanager
def stateless(clients: Clients, family: str, offset: list[int], outputs: list[str]) -> Iterator[Any]:
    """Plain requests, for any replica."""

    def ask(fields: dict[str, Any]) -> dict[str, Vectors]:
        found = {}
        for name in outputs:
            answer = clients.http.post(f"/models/{family}/embed", json=fields | {"output": name})
            assert answer.status_code == 200, answer.text
            document = answer.json()
            found[name] = np.frombuffer(base64.b64decode(document[name]), "<f4").reshape(document["shape"]).copy()
        return found

    yield Stateless(ask, offset, outputs)


PROTOCOLS: list[Protocol] = [websocket_binary, websocket_json, lines, events, stateless]
