"""Train every kind of positions on a task with order, and test it beyond the trained length.

    .venv/bin/python examples/choose_positions.py -o positions.svg
    .venv/bin/python examples/choose_positions.py --encoding mine.py:Ramp

The task: a sequence of random tokens holds one A and one B; say which comes first. Without positions a model can only
guess. Training uses 4 to 16 tokens, the test up to 64. The run takes some minutes on two cores. With
`--encoding`, an encoding of your own joins the comparison: a module built with its width, which takes token vectors
(B, L, width) and returns vectors of this shape. It raises ValueError beyond its longest length.
"""

import argparse
import runpy
import time
from collections.abc import Callable, Mapping
from pathlib import Path

try:
    import torch
    from matplotlib.figure import Figure
    from torch import Tensor, nn
    from torch.nn import functional

    from preblock.failures import fails_in_one_line
    from preblock.models import (
        AlibiBias,
        HybridPositionalEncoding,
        LearnedPositionalEncoding,
        RotaryConfig,
        RotaryEmbedding,
        SinusoidalPositionalEncoding,
        rotate,
    )
    from preblock.plots.files import check_place, save
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs {missing.name}. After `make serve`: .venv/bin/python -m pip install matplotlib torch, "
        "and run it with .venv/bin/python; elsewhere: pip install 'preblock[cpu,torch,plot]'"
    ) from None

WIDTH, HEADS, VOCABULARY = 32, 4, 24
A, B, QUESTION = 0, 1, VOCABULARY - 1
TRAINED_LENGTH = 16
TESTED_LENGTHS = (8, 16, 24, 32, 48, 64)
BATCH, TESTS = 128, 1024
KINDS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "learned": lambda: LearnedPositionalEncoding(WIDTH, TRAINED_LENGTH, dropout=0.0),
    "sinusoidal": lambda: SinusoidalPositionalEncoding(WIDTH, max(TESTED_LENGTHS), dropout=0.0),
    "hybrid": lambda: HybridPositionalEncoding(WIDTH, TRAINED_LENGTH, dropout=0.0),
    "rotary": lambda: RotaryEmbedding(RotaryConfig(dim=WIDTH // HEADS, theta=100.0)),
    "ALiBi": lambda: AlibiBias(HEADS),
}


class Reader(nn.Module):
    """Tokens, attention of the last token to all tokens, and a hidden layer.

    Letters: B batch, L length, D width, H heads.
    """

    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.positions = positions
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.hidden, self.vote = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the votes for "A first" and "B first", (B, 2), of ids (B, L)."""
        x, bias, length = self.tokens(ids), None, ids.shape[1]
        if not isinstance(self.positions, AlibiBias | RotaryEmbedding):
            x = self.positions(x)  # added to the tokens
        query, key, value = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if isinstance(self.positions, RotaryEmbedding):  # in the queries and keys
            cos, sin = self.positions(x)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        elif isinstance(self.positions, AlibiBias):  # in the scores
            bias = self.positions(length - 1, 1, length)
        read = functional.scaled_dot_product_attention(query[:, :, -1:], key, value, attn_mask=bias)
        votes: Tensor = self.vote(functional.relu(self.hidden(read.flatten(1))))
        return votes


def draw(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return ids (count, length), and 1 where A comes first, else 0."""
    ids = torch.randint(2, QUESTION, (count, length))
    places = torch.rand(count, length - 1).argsort(dim=1)[:, :2]
    ids.scatter_(1, places, torch.tensor([[A, B]]).expand(count, 2))
    ids[:, -1] = QUESTION
    return ids, (places[:, 0] < places[:, 1]).long()


def train(reader: Reader, steps: int) -> None:
    """Train on sequences of 4 to `TRAINED_LENGTH` tokens."""
    optimizer = torch.optim.AdamW(reader.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        ids, answers = draw(BATCH, int(torch.randint(4, TRAINED_LENGTH + 1, ())))
        optimizer.zero_grad()
        functional.cross_entropy(reader(ids), answers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(reader: Reader, length: int) -> float | None:
    """Return the share of right answers at a length; None if the positions end before it."""
    ids, answers = draw(TESTS, length)
    try:
        return (reader.eval()(ids).argmax(dim=1) == answers).float().mean().item()
    except ValueError:  # the table is too short
        return None


def run(steps: int, kinds: Mapping[str, Callable[[], nn.Module]]) -> dict[str, list[float | None]]:
    """Return the accuracy of each kind at each of `TESTED_LENGTHS`; print a row as soon as it is known."""
    found = {}
    print("tokens     ", *(f"{length:>7}" for length in TESTED_LENGTHS), flush=True)
    for name, build in kinds.items():
        torch.manual_seed(0)
        reader = Reader(build())
        train(reader, steps)
        found[name] = [accuracy(reader, length) for length in TESTED_LENGTHS]
        shown = ("refused" if value is None else f"{value:>7.1%}" for value in found[name])
        print(f"{name:<11}", *shown, flush=True)
    return found


def load_encoding(source: str) -> tuple[str, Callable[[], nn.Module]]:
    """Return the name and the maker of the module that `source`, FILE:CLASS, names.

    Raises:
        ValueError: there is no such module, it fails, or it does not return vectors of the shape of its input.

    """
    file, _, name = source.rpartition(":")
    if not (file and name):
        raise ValueError(f"got {source}, expected FILE:CLASS, such as mine.py:Ramp")
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}")
    kind = runpy.run_path(file).get(name)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"{file} has no nn.Module {name}")
    for length in (4, *TESTED_LENGTHS):
        given = (2, length, WIDTH)
        try:
            got = tuple(kind(WIDTH)(torch.zeros(given)).shape)
        except Exception as error:  # a module may raise anything
            if isinstance(error, ValueError) and length > TRAINED_LENGTH:
                break  # the table is too short
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name}({WIDTH}) fails for vectors {given}: {reason}") from error
        if got != given:
            raise ValueError(f"{name} returned {got} for {given}, expected the same shape")
    return name, lambda: kind(WIDTH)


def plot(results: dict[str, list[float | None]]) -> Figure:
    """Draw the accuracy by length."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, values in results.items():
        pairs = [(length, value) for length, value in zip(TESTED_LENGTHS, values, strict=True) if value is not None]
        axes.plot(*zip(*pairs, strict=True), marker="o", label=name)
    axes.axvline(TRAINED_LENGTH, color="grey", linestyle="--", label="longest in training")
    axes.set(xlabel="tokens", ylabel="right answers", ylim=(0, 1.02), xticks=TESTED_LENGTHS)
    axes.set_title("Which comes first, A or B?")
    figure.legend(loc="outside right upper")
    return figure


@fails_in_one_line
def main(arguments: list[str] | None = None) -> None:
    """Print a table of accuracies, and draw them."""
    parser = argparse.ArgumentParser(description="Train every kind of positions on a task with order.")
    parser.add_argument("--steps", type=int, default=1500, help="steps of training (%(default)s)")
    parser.add_argument("--encoding", metavar="FILE:CLASS", help="encoding of your own, such as mine.py:Ramp")
    parser.add_argument("-o", "--output", type=Path, help="picture to write, .svg or .png")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"argument --steps: got {given.steps}, expected 1 or more")
    if given.output is not None:
        check_place(given.output)
    kinds = dict(KINDS)
    try:
        if given.encoding is not None:
            kinds.update([load_encoding(given.encoding)])
    except ValueError as error:
        parser.error(f"argument --encoding: {error}")
    began = time.perf_counter()
    results = run(given.steps, kinds)
    print(f"{time.perf_counter() - began:.0f} seconds")
    if given.output is not None:
        save(plot(results), given.output)


if __name__ == "__main__":
    main()
