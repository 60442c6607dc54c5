"""The settings of the service: options of `preblock serve`, variables `PREBLOCK_<NAME>`, or keys of a TOML file."""

import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, PrivateAttr, ValidationError, field_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from preblock.service.core.errors import Invalid

PREFIX = "PREBLOCK_"
RELOADABLE = frozenset(
    (
        *("log_level", "access_log_sample_rate", "access_log_max_token_ids", "cors_origins"),
        *(
            "max_request_tokens",
            "max_request_rows",
            "max_buffered_response_bytes",
            "max_concurrent_requests",
            "rate_limit_per_second",
        ),
        *("max_queue_size", "queue_timeout_seconds"),
        *("max_concurrent_streams", "stream_idle_timeout_seconds", "stream_max_lifetime_seconds"),
        *("sequence_idle_timeout_seconds", "max_sequence_rows", "max_stream_sequence_rows", "header_timeout_seconds"),
    )
)
"""Settings that take effect when the file changes; all others need a restart."""


def _cache() -> Path:
    """Return the cache folder of this user (XDG Base Directory Specification)."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path("~/.cache")) / "preblock"


class Settings(BaseSettings):
    """The settings, made once and passed down; docs/operations.md says more of each.

    An argument wins over the environment, in which an empty variable is none, and that over the file `config`.

    Raises:
        ValidationError: a value is not allowed, or an argument or a key of the file is unknown.
        Invalid: the file cannot be read, or the environment has a variable `PREBLOCK_…` that is no setting.

    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True)

    _options: dict[str, Any] = PrivateAttr()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._options = options

    def again(self) -> "Settings":
        """Return the settings as the environment and the file have them now, of the same arguments.

        Raises:
            Invalid: as `load`.

        """
        return load(self._options).settings

    config_file: Path | None = Field(None, description="TOML file with more of these settings.")
    repository: Path = Field(Path("model_repository"), description="Folder of the artifacts.")
    cache_dir: Path = Field(default_factory=_cache, description="Folder of the hash cache of checked files.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port of HTTP and WebSocket; 0 for a free one.")
    grpc_port: int | None = Field(None, ge=1, le=65535, description="Port of gRPC; without it there is no gRPC.")
    provider: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where models run; auto: CUDA where it works, the CPU elsewhere."
    )
    model_control: Literal["none", "poll", "explicit"] = Field(
        "none", description="What changes the models while they are served: nothing, the folder, or requests."
    )
    model_poll_interval_seconds: float = Field(
        5.0, gt=0, description="With model_control poll: between two looks at the folder."
    )
    workers: int = Field(1, ge=1, description="Processes that serve.")
    intra_op_threads: int = Field(1, ge=1, description="Threads of one session call.")
    log_format: Literal["text", "json"] = Field("text", description="How lines of the log are written.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Least severity of what is logged."
    )
    access_log_sample_rate: float = Field(0.0, ge=0, le=1, description="Share of requests that have a line in the log.")
    access_log_max_token_ids: int = Field(
        0, ge=0, le=4096, description="Most token ids of a request that its line holds."
    )
    tracing: Literal["none", "otlp"] = Field(
        "none", description="Where spans of requests are sent: nowhere, or as the variables OTEL_… say."
    )
    api_keys_file: Path | None = Field(
        None, description="TOML file of the keys that may ask; without it nobody needs one."
    )
    tls_cert_file: Path | None = Field(None, description="PEM file of the certificate; without it there is no TLS.")
    tls_key: Path | None = Field(None, description="PEM file of the key of the certificate, without a password.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of who signs clients; with it each needs a certificate."
    )
    cors_origins: str | None = Field(
        None, description="Origins of pages that browsers let ask, with commas; * for all."
    )
    trusted_proxies: str | None = Field(
        None, description="Addresses or networks, with commas, whose X-Forwarded-For is believed."
    )
    gpu_mem_limit_bytes: int | None = Field(
        None, ge=1, description="Most memory of a GPU that onnxruntime takes for a graph; without it all there is."
    )
    header_timeout_seconds: int = Field(60, ge=1, description="How long the headers of a request may take to come.")
    shutdown_timeout_seconds: int = Field(
        15, ge=1, description="After SIGTERM, how long requests may take to end: first HTTP, then gRPC."
    )
    max_body_bytes: int = Field(16 * 2**20, ge=1, description="Largest request body, and message of a stream.")
    max_request_tokens: int = Field(65536, ge=1, description="Most tokens of one request.")
    max_queue_size: int = Field(64, ge=1, description="Most pieces of work that wait for a thread.")
    queue_timeout_seconds: float = Field(30.0, gt=0, description="How long work may wait for a thread.")
    max_request_rows: int = Field(65536, ge=1, description="Most rows of one request.")
    max_buffered_response_bytes: int = Field(
        64 * 2**20, ge=8 * 2**20, description="Most bytes of vectors in an answer that cannot be sent in pieces."
    )
    max_concurrent_requests: int = Field(1024, ge=1, description="Most requests that a process answers at a time.")
    rate_limit_per_second: float | None = Field(
        None, gt=0, description="Most requests of a key in a second, or of an address where there are no keys."
    )
    max_concurrent_streams: int = Field(1024, ge=1, description="Most streams that a process has open.")
    stream_idle_timeout_seconds: int = Field(600, ge=1, description="How long a stream may wait for its client.")
    stream_max_lifetime_seconds: int = Field(86400, ge=1, description="How long a stream may stay open.")
    sequence_idle_timeout_seconds: int = Field(
        600, ge=1, description="How long a sequence may wait for its next request."
    )
    max_sequence_rows: int = Field(65536, ge=1, description="Most rows of the sequences of a process.")
    max_stream_sequence_rows: int = Field(4096, ge=1, description="Most rows of the sequences of one stream of gRPC.")

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, text: str | None) -> str | None:
        if not all(re.fullmatch(r"\*|https?://[^/\s,*]+", origin) for origin in listed(text)):
            raise ValueError("origins such as https://pages.example, with commas between them, or *")
        return text

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, text: str | None) -> str | None:
        try:
            for network in listed(text):
                ip_network(network)
        except ValueError as error:
            raise ValueError("addresses or networks such as 10.0.0.0/8, with commas between them") from error
        return text

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (the names are pydantic's)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return where settings come from, the strongest first."""
        _refuse_unknown_variables()
        file = {**env_settings(), **init_settings()}.get("config_file")
        return init_settings, env_settings, InitSettingsSource(settings_cls, _read(file))


class LoadedSettings(NamedTuple):
    """Settings, and where the value of each comes from: `--port`, `PREBLOCK_PORT`, a file, or `default`."""

    settings: Settings
    origins: Mapping[str, str]


def load(options: Mapping[str, Any]) -> LoadedSettings:
    """Return the settings, with `options` from the command line.

    Raises:
        Invalid: as `Settings`; of a value that is not allowed, `field` says where it comes from.

    """
    try:
        settings = Settings(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise Invalid(_config(options), name, _meant(name, list(Settings.model_fields))) from error
        origin = _origin(name, options)
        where = f"{name} in {origin}" if origin == _config(options) else origin
        raise Invalid(where, first["input"], _allowed(first["msg"])) from error
    return LoadedSettings(settings, {name: _origin(name, options) for name in Settings.model_fields})


def listed(text: str | None) -> list[str]:
    """Return the parts of a comma-separated setting."""
    return [] if text is None else [part.strip() for part in text.split(",")]


def option(name: str) -> str:
    """Return the option of a setting on the command line."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def _allowed(message: str) -> str:
    if message.startswith("Input is not a valid path"):  # and which class of Python it was to be
        return "a path"
    return message.removeprefix("Input should be ").removeprefix("Value error, ")


def _origin(name: str, options: Mapping[str, Any]) -> str:
    if name in options:
        return option(name)
    if name in _environment():
        return variable(name)
    config = _config(options)
    return config if config and name in _read(config) else "default"


def _config(options: Mapping[str, Any]) -> str:
    return str(options.get("config_file") or _environment().get("config_file", ""))


def _environment() -> dict[str, str]:
    """Return the variables that are settings, by the name of the setting, as pydantic finds them: in any case."""
    return {
        name.lower().removeprefix(PREFIX.lower()): value
        for name, value in os.environ.items()
        if name.upper().startswith(PREFIX) and value
    }


def _refuse_unknown_variables() -> None:
    for name in _environment():
        if name not in Settings.model_fields:
            raise Invalid("environment", variable(name), _meant(variable(name), map(variable, Settings.model_fields)))


def _meant(name: str, known: Any) -> str:
    """Return the allowed names for the error about an unknown `name`."""
    close = get_close_matches(name, known, 1)
    return f"{close[0]}, or another that preblock settings lists" if close else "those that preblock settings lists"


def _read(file: str | Path | None) -> dict[str, Any]:
    """Return the settings in a file; none where there is none."""
    if file is None:
        return {}
    try:
        document = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise Invalid("config_file", str(file), f"a TOML file that can be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or too deep
        raise Invalid("config_file", str(file), f"a TOML file ({error})") from error
    if "config_file" in document:
        raise Invalid(str(file), "config_file", "every other setting, since this is the file")
    return document
