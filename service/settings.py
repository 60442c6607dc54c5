"""Every setting of the service: an environment variable `INCIPIT_<NAME>`, or an option of `incipit serve`."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """The settings, made once and passed down.

    Args:
        repository: folder of the artifacts.
        host: address to listen on.
        port: port of HTTP and WebSocket; 0 for a free one.
        grpc_port: port of gRPC; None for no gRPC.
        provider: execution provider; "auto" takes CUDA where it works and the CPU elsewhere.
        workers: processes that serve.
        threads: threads of one session call.
        max_body_bytes: largest request body, in bytes.
        max_tokens: most tokens of one request.
        max_waiting: most pieces of work that wait for a thread.

    """

    model_config = SettingsConfigDict(env_prefix="INCIPIT_", frozen=True)

    repository: Path = Path("model_repository")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    grpc_port: int | None = Field(None, ge=1, le=65535)
    provider: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)
    max_body_bytes: int = Field(16 * 2**20, ge=1)
    max_tokens: int = Field(65536, ge=1)
    max_waiting: int = Field(64, ge=1)
