"""Generate tokens with blocks in PyTorch; a running server supplies the vectors of block 0, one step at a time.

    make serve                               # in another terminal
    .venv/bin/python examples/decode_loop.py --prompt "15496 11 995" --tokens 20

The blocks have random weights, so the tokens have no meaning. The program proves the loop: one call with the whole
sequence must lead to the same tokens. With the blocks of a published model: `generate_with_transformers.py`.
"""

import argparse

try:
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

    import preblock
    from preblock.client import Client, Model
    from preblock.failures import fails_in_one_line
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs {missing.name}. After `make serve`: .venv/bin/python -m pip install torch, "
        "and run it with .venv/bin/python; elsewhere: pip install preblock torch"
    ) from None

LAYERS, HEAD_WIDTH = 2, 64


class Block(nn.Module):
    """A block of a decoder: attention over all tokens so far, and a feed-forward layer.

    Letters: L tokens of a call, D width, H heads.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.cache: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors after the block, (L, D). The keys and values of earlier calls are in the cache."""
        length, width = x.shape
        query, key, value = (
            part.view(length, self.heads, -1).transpose(0, 1) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        if self.cache is not None:
            key, value = torch.cat([self.cache[0], key], 1), torch.cat([self.cache[1], value], 1)
        self.cache = key, value
        # Token i of this call may see all earlier tokens, and the tokens up to i of this call.
        visible = torch.ones(length, key.shape[1], dtype=torch.bool).tril(key.shape[1] - length)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=visible)  # (H, L, D / H)
        x = x + self.out(mixed.transpose(0, 1).reshape(length, width))
        vectors: Tensor = x + self.down(gelu(self.up(self.norms[1](x))))
        return vectors


class Blocks(nn.Module):
    """A decoder without its front-end: blocks, a norm, and the projection to the vocabulary."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the most likely token after each of the vectors: (L, D) becomes int64 (L,)."""
        for block in self.blocks:
            vectors = block(vectors)
        tokens: Tensor = self.head(self.norm(vectors)).argmax(-1)
        return tokens

    def forget(self) -> None:
        """Empty the caches."""
        for block in self.blocks:
            block.cache = None


@torch.inference_mode()
def generate(client: Client, model: str, blocks: Blocks, prompt: list[int], count: int) -> list[int]:
    """Return `count` tokens after the prompt. The stream holds the offset, and the caches hold the past."""
    blocks.forget()
    tokens: list[int] = []
    fed = prompt
    with client.decode(model, resume=True) as stream:
        while len(tokens) < count:
            vectors = torch.from_numpy(stream.step(fed))[0]
            tokens.append(int(blocks(vectors)[-1]))
            fed = tokens[-1:]
    return tokens


@torch.inference_mode()
def predict_at_once(client: Client, model: str, blocks: Blocks, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return the tokens predicted from the whole sequence, with one call and no cache."""
    blocks.forget()
    vectors = client.embed([prompt + tokens[:-1]], model=model).to_torch()[0]
    predicted: list[int] = blocks(vectors)[len(prompt) - 1 :].tolist()
    return predicted


def find_model(client: Client, server: str, name: str) -> Model:
    """Return the description of the model `name`, or exit with the reason."""
    if not client.ready():
        raise SystemExit(f"No server is ready at {server}. Start one with `make serve`, or name another with --server.")
    models = {model.name: model for model in client.models() if model.kind == "tokens"}
    if name not in models:
        raise SystemExit(f"{server} has no model {name!r} of token ids. Name one with --model: {', '.join(models)}.")
    return models[name]


def read_prompt(client: Client, model: Model, prompt: str) -> list[int]:
    """Return the token ids of the prompt: numbers, or a text for the model's tokenizer."""
    words = prompt.replace(",", " ").split()
    if words and all(word.isdecimal() for word in words):
        return [int(word) for word in words]
    if not model.has_tokenizer:
        raise SystemExit(f"--prompt: {model.name} has no tokenizer. Give token ids, such as '15496 11 995'.")
    found = client.text(prompt, model=model.name, return_tokens=True).input_ids
    assert found is not None
    return [int(token) for token in found[0]]


def positive(text: str) -> int:
    """Read a number of tokens."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 1 on")
    return int(text)


@fails_in_one_line
def main(arguments: list[str] | None = None) -> None:
    """Generate tokens, and compare them with one call of the whole sequence."""
    parser = argparse.ArgumentParser(description="Generate tokens with the vectors of a running Preblock server.")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="address of the server (%(default)s)")
    parser.add_argument("--model", default="gpt2-small", help="name of the model (%(default)s)")
    parser.add_argument("--prompt", default="15496 11 995", help="token ids, or a text if the model has a tokenizer")
    parser.add_argument("--tokens", type=positive, default=20, help="number of tokens to generate (%(default)s)")
    given = parser.parse_args(arguments)
    with preblock.connect(given.server) as client:
        model = find_model(client, given.server, given.model)
        prompt = read_prompt(client, model, given.prompt)
        length = len(prompt) + given.tokens - 1
        if model.max_len is not None and length > model.max_len:
            raise SystemExit(
                f"--tokens: the prompt of {len(prompt)} and {given.tokens} tokens are too long for {model.name}, "
                f"which has {model.max_len} positions."
            )
        blocks = Blocks(model.width, model.vocab_size or 0)
        tokens = generate(client, model.name, blocks, prompt, given.tokens)
        print(*prompt, "->", *tokens)
        if tokens != predict_at_once(client, model.name, blocks, prompt, tokens):
            raise SystemExit("One call with the whole sequence gives other tokens.")
        print("One call with the whole sequence gives the same tokens.")


if __name__ == "__main__":
    main()
