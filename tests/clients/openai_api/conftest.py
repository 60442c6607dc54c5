"""Clients of openai, connected to the shared servers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.clients.openai_api.responses import connected
from tests.support.servers import Server


@pytest.fixture(scope="module")
def openai_client(model_server: Server) -> Iterator[openai.OpenAI]:
    with connected(model_server) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny_openai(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with connected(tiny_server) as opened:
        yield opened


@pytest.fixture(scope="module")
def minilm_tokenizer(minilm_checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(minilm_checkpoint)
