"""Generate tokens with a decoder without its front-end; a running server supplies the vectors of block 0.

    python examples/generate_with_transformers.py            # a tiny GPT-2 with random weights: learned positions
    python examples/generate_with_transformers.py opt        # OPT: positions derived from the mask
    python examples/generate_with_transformers.py llama      # Llama: rotary cosines and sines from the server
    python examples/generate_with_transformers.py FOLDER     # a checkpoint of these families, saved by transformers

The program exports and serves the front-end of the model, and generates with its blocks. First greedily, for a batch of
prompts of unequal lengths padded on the left, with draft tokens and a broken connection. Then by beam search. The
tokens must equal the output of `generate()` in transformers.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

try:
    import torch
    import transformers
    from torch import Tensor, nn

    import preblock
    from preblock.failures import fails_in_one_line
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs {missing.name}. Install its packages: "
        "pip install 'preblock[cpu,torch]' 'transformers>=5.24'"
    ) from None
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):  # earlier ones ignore the argument `cache`
    raise SystemExit(
        f"transformers: got version {transformers.__version__}, expected 5.24 or newer: "
        "pip install 'transformers>=5.24'"
    )

DRAFT = 3
BREAK_STEP = 6
"""The connection breaks before this step."""
PROMPTS, COUNT, BEAMS = [[5, 6, 7], [11], [3, 10, 4, 10, 5], [9, 12]], 20, 3
BLOCKS = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "llama": "model.layers"}
COMPANIONS = {"llama": ("rotary_cos", "rotary_sin")}
"""Further inputs of the blocks, by family."""
Open = Callable[[list[int]], AbstractContextManager[Any]]
"""Opens a stream with rows at the given offsets."""
Draft = Callable[[int, list[int]], list[int]]


class Body:
    """A decoder of transformers without its front-end.

    Args:
        model: model of transformers.
        blocks: its blocks.

    """

    def __init__(self, model: Any, blocks: nn.ModuleList) -> None:
        self.model = model
        self.cache = self.empty_cache()
        self._given: list[Tensor] = []
        # `inputs_embeds` is no replacement, because the model adds positions to them.
        self._hooks = [
            block.register_forward_pre_hook(self._injecting(number), with_kwargs=True)
            for number, block in enumerate(blocks)
        ]

    def empty_cache(self) -> Any:
        """Return an empty cache of keys and values."""
        return transformers.DynamicCache(config=self.model.config)

    def remove(self) -> None:
        """Remove the hooks, to give the model its front-end back."""
        for hook in self._hooks:
            hook.remove()

    def _injecting(self, number: int) -> Any:
        """Return the hook of a block. The first block gets the vectors, and each block the cosines and sines."""

        def inject(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            vectors, *companions = self._given
            if companions:
                kwargs = kwargs | {"position_embeddings": tuple(companions)}
            if number > 0:
                return args, kwargs
            return ((vectors, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": vectors})

        return inject

    @torch.no_grad()
    def __call__(self, given: list[Tensor], mask: Tensor) -> Tensor:
        """Return the logits (B, L, V) for vectors (B, L, D) and, for rotary models, cosines and sines.

        `mask` (B, K) covers all tokens fed so far and is 0 for padding.
        """
        self._given = given
        logits: Tensor = self.run(mask).logits
        return logits

    def run(self, mask: Tensor) -> Any:
        """Run the model on the given vectors."""
        ids = torch.zeros(self._given[0].shape[:2], dtype=torch.long)  # the hooks replace the vectors of these ids
        return self.model(ids, attention_mask=mask, cache=self.cache, use_cache=True)


def fetch(stream: Any, rows: list[list[int]], mask: Tensor) -> list[Tensor]:
    """Return each output (B, L, width) for the next tokens, zero where `mask` (B, L) is 0 for padding."""
    vectors = stream.step(rows)  # ragged rows, without padding
    given = []
    for array in (vectors, *stream.companions.values()):
        tensor = torch.from_numpy(array).reshape(-1, array.shape[-1])
        given.append(torch.zeros(*mask.shape, tensor.shape[-1]))
        given[-1][mask.bool()] = tensor
    return given


def padded(prompts: list[list[int]]) -> Tensor:
    """Return the attention mask of prompts padded on the left, (B, L)."""
    longest = max(map(len, prompts))
    return torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def repeat(prompt: int, tokens: list[int]) -> list[int]:  # noqa: ARG001 - a draft model would use it
    """Guess the tokens after `tokens` by repeating the last one, in place of a draft model."""
    return [tokens[-1]] * DRAFT


def generate(open_at: Open, body: Body, prompts: list[list[int]], count: int, draft: Draft = repeat) -> list[list[int]]:
    """Return `count` tokens after each prompt by greedy search with draft tokens."""
    with ExitStack() as stack:
        stream = stack.enter_context(open_at([0] * len(prompts)))
        mask = padded(prompts)
        logits = body(fetch(stream, prompts, mask), mask)[:, -1]
        tokens: list[list[int]] = [[] for _ in prompts]
        turn = 0
        while len(tokens[0]) < count:
            turn += 1
            if turn == BREAK_STEP:  # any server of the model can continue, given the offsets
                offset = stream.offset
                stack.close()
                stream = stack.enter_context(open_at(offset))
            fed = [[token] for token in logits.argmax(-1).tolist()]
            drafts = DRAFT if turn % 4 == 0 else 0
            if drafts:
                for prompt, new in enumerate(fed):
                    new += draft(prompt, tokens[prompt] + new)
            new_mask = torch.ones(len(fed), 1 + drafts, dtype=torch.long)
            mask = torch.cat([mask, new_mask], 1)
            found = body(fetch(stream, fed, new_mask), mask)
            predicted = found.argmax(-1)
            kept = 0  # number of draft tokens confirmed in all rows
            while kept < drafts and all(predicted[row, kept] == fed[row][kept + 1] for row in range(len(fed))):
                kept += 1
            if kept < drafts:
                stream.rewind([offset - (drafts - kept) for offset in stream.offset])
                mask = mask[:, : mask.shape[1] - (drafts - kept)]
                body.cache.crop(kept - drafts)
            for row, new in zip(tokens, fed, strict=True):
                row += new[: 1 + kept]
            logits = found[:, kept]
    return [row[:count] for row in tokens]


def search(open_at: Open, body: Body, prompts: list[list[int]], count: int, beams: int) -> list[list[int]]:
    """Return `count` tokens after each prompt by beam search."""
    with open_at([0] * len(prompts)) as stream:
        mask = padded(prompts)
        logits = body(fetch(stream, prompts, mask), mask)[:, -1]
        # From here on, each prompt has one row per beam.
        source = [prompt for prompt in range(len(prompts)) for _ in range(beams)]
        scores = torch.tensor([[0.0] + [-1e9] * (beams - 1)] * len(prompts))
        tokens: list[list[int]] = [[] for _ in source]
        begin = torch.arange(len(prompts))[:, None] * beams
        logits, mask = logits[source], mask[source]
        stream.reorder(source)
        body.cache.reorder_cache(torch.tensor(source))
        while True:
            likely = scores[..., None] + logits.log_softmax(-1).reshape(len(prompts), beams, -1)
            scores, found = likely.flatten(1).topk(beams)
            following = (found % logits.shape[-1]).flatten().tolist()
            source = (begin + found // logits.shape[-1]).flatten().tolist()
            tokens = [[*tokens[row], token] for row, token in zip(source, following, strict=True)]
            if len(tokens[0]) == count:
                return tokens[::beams]
            stream.reorder(source)
            body.cache.reorder_cache(torch.tensor(source))
            new_mask = torch.ones(len(source), 1, dtype=torch.long)
            mask = torch.cat([mask[source], new_mask], 1)
            logits = body(fetch(stream, [[token] for token in following], new_mask), mask)[:, -1]


def library(model: Any, prompts: list[list[int]], count: int, beams: int = 1) -> list[list[int]]:
    """Return the tokens of `generate()` in transformers."""
    mask = padded(prompts)
    ids = torch.zeros_like(mask)
    ids[mask.bool()] = torch.tensor([token for prompt in prompts for token in prompt])
    options = {"max_new_tokens": count, "do_sample": False, "num_beams": beams}
    options |= {"pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=mask, **options)[:, mask.shape[1] :].tolist()


def tiny(family: str) -> Any:
    """Return a tiny model with random weights, large enough for positions to change the output."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "gpt2":
        sizes |= {"n_positions": 64, "bos_token_id": None, "eos_token_id": None}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.5)).eval()
    sizes |= {"max_position_embeddings": 64}
    if family == "opt":
        sizes |= {"ffn_dim": 37, "word_embed_proj_dim": 32}
        return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, init_std=0.5)).eval()
    sizes |= {"intermediate_size": 37}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.1)).eval()


def read(folder: str) -> Any:
    """Return the model in a folder."""
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    except Exception as error:  # of transformers, safetensors and torch
        raise SystemExit(f"source: {folder}: {' '.join(str(error).split())}") from error


@fails_in_one_line
def main(arguments: list[str] | None = None) -> None:
    """Export, serve, generate and compare."""
    parser = argparse.ArgumentParser(description="Generate tokens with the blocks of a model and a served front-end.")
    parser.add_argument(
        "source", nargs="?", default="gpt2", help=f"a tiny model ({', '.join(BLOCKS)}), or a folder with a checkpoint"
    )
    source: str = parser.parse_args(arguments).source
    if source not in BLOCKS and not Path(source).is_dir():
        raise SystemExit(f"source: {source!r} is neither {', '.join(BLOCKS)} nor a folder")
    model = tiny(source) if source in BLOCKS else read(source)
    family = model.config.model_type
    if family not in BLOCKS:
        raise SystemExit(f"source: {source} holds a {family}; this example knows {', '.join(BLOCKS)}")
    with tempfile.TemporaryDirectory() as folder:
        if source in BLOCKS:
            source = f"{folder}/source"
            model.save_pretrained(source)
        command = [str(Path(sys.executable).parent / "preblock")]
        repository = ["--repository", f"{folder}/repository"]
        if subprocess.run([*command, "export", source, "--name", "front", *repository], check=False).returncode:
            raise SystemExit(1)  # the export printed its error
        serve = [*command, "serve", *repository, "--port", "0"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                found = next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))
                compare(model, found[0], "front")
            finally:
                server.terminate()


def compare(model: Any, address: str, name: str) -> None:
    """Generate with vectors of the server and with transformers alone, and compare the tokens."""
    family = model.config.model_type
    with preblock.connect(address) as client:

        def open_at(offset: list[int]) -> AbstractContextManager[Any]:
            return client.decode(name, offset=offset, companions=COMPANIONS.get(family, ()))

        blocks = model.get_submodule(BLOCKS[family])
        greedy = Body(model, blocks)
        ours = [generate(open_at, greedy, PROMPTS, COUNT)]
        greedy.remove()
        beam = Body(model, blocks)
        ours.append(search(open_at, beam, PROMPTS, COUNT, BEAMS))
        beam.remove()
    equal = True
    for beams, tokens in zip((1, BEAMS), ours, strict=True):
        for prompt, row, expected in zip(PROMPTS, tokens, library(model, PROMPTS, COUNT, beams), strict=True):
            print(f"{beams} beams:", prompt, "->", row, "as the library" if row == expected else f"NOT {expected}")
            equal &= row == expected
    if not equal:
        raise SystemExit("the tokens differ")


if __name__ == "__main__":
    main()
