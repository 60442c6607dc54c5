"""A text of a megabyte without a space takes a bounded time, and other requests go on meanwhile."""

import random
import string
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from preblock.export.exporter import export
from tests.support.checkpoints import write_gpt2
from tests.support.servers import Server, serve

VOCABULARY, CHARACTERS = 1024, 2**20
MAX_LONG_SECONDS = 60
"""About 1 second without other load."""
LEAST_SECONDS = 0.02
"""Shorter delays are those of a busy machine."""


def letters(count: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=count))


def make_tokenizer(kind: str) -> tokenizers.Tokenizer:
    model: Any = models.BPE() if kind == "bpe" else models.Unigram()
    trainer: Any = trainers.BpeTrainer if kind == "bpe" else trainers.UnigramTrainer
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    options: dict[str, Any] = {} if kind == "bpe" else {"unk_token": "[UNK]"}
    corpus = [" ".join(letters(1 + seed % 9, seed + 50 * text) for seed in range(50)) for text in range(100)]
    tokenizer.train_from_iterator(
        corpus, trainer(vocab_size=VOCABULARY, show_progress=False, special_tokens=["[UNK]"], **options)
    )
    return tokenizer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two models that differ in their tokenizers only."""
    root = tmp_path_factory.mktemp("long texts")
    for kind in ("bpe", "unigram"):
        folder = write_gpt2(root / kind, np.ones((VOCABULARY, 8), np.float32), np.ones((64, 8), np.float32))
        make_tokenizer(kind).save(str(folder / "tokenizer.json"))
        export(str(folder), kind, root / "models", tokenizer="ignore-conflicts")
    with serve(root / "models") as running:
        yield running


def measure(server: Server, kind: str, busy: threading.Thread | None = None) -> float:
    """Return the 99th percentile of the seconds of short requests, for 2 seconds or as long as `busy` runs."""
    seconds = []
    begin = time.perf_counter()
    with httpx.Client(base_url=server.address, timeout=MAX_LONG_SECONDS) as client:
        while time.perf_counter() < begin + 2 if busy is None else busy.is_alive():
            for fields in ({"text": "a few words"}, {"input_ids": [[1, 2, 3]]}):
                began = time.perf_counter()
                assert client.post(f"/models/{kind}/embed", json=fields).status_code == 200
                seconds.append(time.perf_counter() - began)
    return float(np.percentile(seconds, 99))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_long_text_is_bounded_and_delays_no_other(server: Server, kind: str) -> None:
    before = measure(server, kind)
    for special in ("allow", "refuse"):
        body = {"text": letters(CHARACTERS, 1), "special_tokens_in_text": special}
        answers: list[httpx.Response] = []

        def send(body: dict[str, str] = body, answers: list[httpx.Response] = answers) -> None:
            answers.append(httpx.post(f"{server.address}/models/{kind}/embed", json=body, timeout=MAX_LONG_SECONDS))

        thread = threading.Thread(target=send)
        thread.start()
        during = measure(server, kind, thread)
        thread.join()
        assert [answer.status_code for answer in answers] == [413]
        assert " tokens, expected at most 65536 tokens in a request" in answers[0].json()["detail"]
        assert during <= 5 * max(before, LEAST_SECONDS), special
