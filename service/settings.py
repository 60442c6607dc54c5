"""Every setting of the service: an environment variable `INCIPIT_<NAME>`, or an option of `incipit serve`."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _cache() -> Path:
    """Return where this user keeps what can be made again, as the XDG Base Directory Specification has it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path("~/.cache")) / "incipit"


class Settings(BaseSettings):
    """The settings, made once and passed down.

    Args:
        repository: folder of the artifacts.
        cache: folder in which files that were checked are remembered; a leading ~ is the user's home.
        host: address to listen on.
        port: port of HTTP and WebSocket; 0 for a free one.
        grpc_port: port of gRPC; None for no gRPC.
        provider: execution provider; "auto" takes CUDA where it works and the CPU elsewhere.
        model_control: what changes the models that are served: "none" nothing, "poll" the folder, which is looked at
            again and again, "explicit" requests to load and unload.
        poll_seconds: between two looks at the folder.
        workers: processes that serve.
        threads: threads of one session call.
        max_body_bytes: largest request body, in bytes.
        max_tokens: most tokens of one request.
        max_waiting: most pieces of work that wait for a thread.
        stream_idle_seconds: how long a decode stream may wait for its client to send, or to read.
        stream_seconds: how long a decode stream may stay open.

    """

    model_config = SettingsConfigDict(env_prefix="INCIPIT_", frozen=True)

    repository: Path = Path("model_repository")
    cache: Path = Field(default_factory=_cache)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    grpc_port: int | None = Field(None, ge=1, le=65535)
    provider: Literal["auto", "cpu", "cuda"] = "auto"
    model_control: Literal["none", "poll", "explicit"] = "none"
    poll_seconds: float = Field(5.0, gt=0)
    workers: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)
    max_body_bytes: int = Field(16 * 2**20, ge=1)
    max_tokens: int = Field(65536, ge=1)
    max_waiting: int = Field(64, ge=1)
    stream_idle_seconds: int = Field(600, ge=1)
    stream_seconds: int = Field(86400, ge=1)
