"""Generates text ids with a decoder that starts at block 0: every vector that enters it comes from a running server.

    python examples/decode_loop.py            # GPT-2: learned positions
    python examples/decode_loop.py llama      # rotary: cosines and sines are served too

makes a tiny model with random weights, exports and serves it, and generates greedily: a batch of prompts of unequal
length (padded on the left, as decoders have it), in which rows change places, drafts are tried and taken back, and the
connection breaks in the middle. The tokens must be those of the library's own `generate()`.
"""

import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from websockets.sync.client import connect

HEADER = struct.Struct("<4sBBHIII4s")
STEP, VECTORS, ERROR, REWIND, REORDER, STATE = 1, 2, 3, 4, 5, 10
DRAFT = 3
Draft = Callable[[int, list[int]], list[int]]


class Stream:
    """Rows that are decoded together; where each is, is all that a new connection needs.

    Args:
        address: such as ws://127.0.0.1:8000/models/mine/decode.
        outputs: which tensors to ask for.
        offset: how many tokens of each row were fed before.

    """

    def __init__(self, address: str, outputs: Sequence[str], offset: list[int]) -> None:
        self.address, self.outputs, self.offset = address, outputs, offset
        self._number = 0
        self.connect()

    def connect(self) -> None:
        """Connect, here or anywhere else that serves the model, and go on where the rows are."""
        query = f"offset={json.dumps(self.offset, separators=(',', ':'))}&output={','.join(self.outputs)}"
        self._context = connect(f"{self.address}?{query}", max_size=None)
        self._socket = self._context.__enter__()

    def close(self) -> None:
        """Disconnect."""
        self._context.__exit__(None, None, None)

    def step(self, rows: list[list[int]]) -> list[Tensor]:
        """Feed each row its next tokens, and return each output (T, width), the rows one after another."""
        ids = np.array([token for row in rows for token in row], "<i8")
        lengths = np.array([len(row) for row in rows], "<u4")
        return self._ask(STEP, len(rows), len(ids), ids.tobytes() + lengths.tobytes())

    def rewind(self, offset: list[int]) -> None:
        """Take the last tokens of rows back."""
        self._ask(REWIND, len(offset), 0, np.array(offset, "<i8").tobytes())

    def reorder(self, source: list[int]) -> None:
        """Let row i go on from where row `source[i]` is."""
        self._ask(REORDER, len(source), 0, np.array(source, "<i8").tobytes())

    def _ask(self, kind: int, rows: int, tokens: int, body: bytes) -> list[Tensor]:
        self._number += 1
        self._socket.send(HEADER.pack(b"INCP", 2, kind, 0, self._number, rows, tokens, bytes(4)) + body)
        frame: Any = self._socket.recv()
        _, _, kind, _, _, rows, tokens, last = HEADER.unpack_from(frame)
        at = HEADER.size
        if kind == ERROR:
            raise RuntimeError(frame[at:].decode())
        self.offset = np.frombuffer(frame, "<i8", rows, at).tolist()
        at += 8 * rows
        if kind == STATE:
            return []
        widths = np.frombuffer(frame, "<u4", last[1], at + 4 * rows).tolist()
        at += 4 * rows + 4 * len(widths)
        tensors = []
        for width in widths:
            tensors.append(torch.tensor(np.frombuffer(frame, "<f4", tokens * width, at).reshape(tokens, width)))
            at += 4 * tokens * width
        return tensors


class Body:
    """A decoder of transformers without its front-end.

    Args:
        model: whose blocks run.
        blocks: those blocks.

    """

    def __init__(self, model: Any, blocks: nn.ModuleList) -> None:
        self.model = model
        self.cache = transformers.DynamicCache(config=model.config)
        self._given: list[Tensor] = []
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._injecting(number), with_kwargs=True)

    def _injecting(self, number: int) -> Any:
        """Return the hook of a block: the first is handed the vectors, each of them the cosines and sines."""

        def inject(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            vectors, *companions = self._given
            if companions:
                kwargs = kwargs | {"position_embeddings": tuple(companions)}
            return (vectors, *args[1:]) if number == 0 else args, kwargs

        return inject

    @torch.no_grad()
    def __call__(self, given: list[Tensor], mask: Tensor) -> Tensor:
        """Return the logits (B, L, V) of the tokens whose vectors (and cosines and sines) are given, each (B, L, …).

        `mask` (B, K) is 0 for padding, of all tokens that were ever fed.
        """
        self._given = given
        batch, length, _ = given[0].shape
        ids = torch.zeros(batch, length, dtype=torch.long)  # what they are, the model never learns
        return self.model(ids, attention_mask=mask, past_key_values=self.cache, use_cache=True).logits


def repeat(prompt: int, tokens: list[int]) -> list[int]:  # noqa: ARG001 - a better guess would use it
    """Guess the tokens that follow `tokens` of a prompt; a draft model would stand here."""
    return [tokens[-1]] * DRAFT


def generate(
    stream: Stream, body: Body, prompts: list[list[int]], count: int, draft: Draft = repeat
) -> tuple[list[int], list[list[int]]]:
    """Return of each row in the end which prompt it continues, and its first `count` tokens."""
    lengths, longest = [len(prompt) for prompt in prompts], max(map(len, prompts))
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    given = []
    for tensor in stream.step(prompts):  # the rows as they are: padding is never asked for
        given.append(torch.zeros(len(prompts), longest, tensor.shape[-1]))
        given[-1][mask.bool()] = tensor
    logits = body(given, mask)[:, -1]
    origin = list(range(len(prompts)))
    tokens: list[list[int]] = [[] for _ in prompts]
    turn = 0
    while len(tokens[0]) < count:
        turn += 1
        following = logits.argmax(-1).tolist()
        if turn == 3:  # as in beam search: the last row goes on twice, the first is given up
            source = [len(prompts) - 1, *range(1, len(prompts))]
            stream.reorder(source)
            body.cache.reorder_cache(torch.tensor(source))
            mask, following = mask[source], [following[row] for row in source]
            origin, tokens = [origin[row] for row in source], [list(tokens[row]) for row in source]
        if turn == 6:
            stream.close()
            stream.connect()
        fed = [[token] for token in following]
        drafts = DRAFT if turn % 4 == 0 else 0
        if drafts:  # those are kept that all rows confirm
            for prompt, row, new in zip(origin, tokens, fed, strict=True):
                new += draft(prompt, row + new)
        mask = torch.cat([mask, torch.ones(len(fed), 1 + drafts, dtype=torch.long)], 1)
        given = [tensor.reshape(len(fed), 1 + drafts, -1) for tensor in stream.step(fed)]
        found = body(given, mask)
        predicted = found.argmax(-1)
        kept = 0
        while kept < drafts and all(predicted[row, kept] == fed[row][kept + 1] for row in range(len(fed))):
            kept += 1
        if kept < drafts:
            stream.rewind([offset - (drafts - kept) for offset in stream.offset])
            mask = mask[:, : mask.shape[1] - (drafts - kept)]
            body.cache.crop(kept - drafts)
        for row, new in zip(tokens, fed, strict=True):
            row += new[: 1 + kept]
        logits = found[:, kept]
    return origin, [row[:count] for row in tokens]


def library(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return what transformers itself generates."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()


def tiny(family: str) -> tuple[Any, Any, list[str]]:
    """Return a model with random weights, its blocks, and the outputs that it needs."""
    torch.manual_seed(0)
    if family == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=97, **sizes, max_position_embeddings=64)
        model = transformers.LlamaForCausalLM(config).eval()
        return model, model.model.layers, ["embeddings", "rotary_cos", "rotary_sin"]
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    # Larger than usual, so that positions matter to what is generated.
    config.initializer_range = 0.5
    model = transformers.GPT2LMHeadModel(config).eval()
    return model, model.transformer.h, ["embeddings"]


def main(family: str = "gpt2") -> None:
    """Export, serve, generate and compare."""
    model, blocks, outputs = tiny(family)
    prompts, count = [[5, 6, 7], [11], [3, 1, 4, 1, 5], [9, 2]], 20
    expected = library(model, prompts, count)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/source")
        incipit = [str(Path(sys.executable).parent / "incipit")]
        repository = ["--repository", f"{folder}/repository"]
        subprocess.run([*incipit, "export", f"{folder}/source", "--name", "tiny", *repository], check=True)
        serve = [*incipit, "serve", *repository, "--port", "0"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                found = next(filter(None, (re.search(r"http://(\S+)", line) for line in server.stdout)))
                address = f"ws://{found[1]}/models/tiny/decode"
                stream = Stream(address, outputs, [0] * len(prompts))
                origin, tokens = generate(stream, Body(model, blocks), prompts, count)
                stream.close()
            finally:
                server.terminate()
    for row, ids in zip(origin, tokens, strict=True):
        print(prompts[row], "->", ids, "as the library" if ids == expected[row] else f"NOT {expected[row]}")
    if tokens != [expected[row] for row in origin]:
        raise SystemExit("the tokens differ")


if __name__ == "__main__":
    main(*sys.argv[1:])
