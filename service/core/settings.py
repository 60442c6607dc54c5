"""The settings of the service: options of `preblock serve`, variables `PREBLOCK_<NAME>`, or a TOML file, reloaded."""

import hashlib
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import quote

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from preblock.service.core.errors import Invalid
from preblock.service.core.file_watch import FileWatcher, check_regular, poll
from preblock.service.core.schema_errors import explain

PREFIX = "PREBLOCK_"
RELOADABLE = frozenset(
    (
        *("log_level", "access_log_sample_rate", "access_log_max_token_ids", "cors_origins"),
        *("header_timeout_seconds", "body_timeout_seconds"),
        *("max_request_tokens", "max_request_rows", "max_buffered_response_bytes", "max_concurrent_requests"),
        *("rate_limit_per_second", "max_queue_size", "queue_timeout_seconds", "max_concurrent_streams"),
        *("stream_idle_timeout_seconds", "stream_max_lifetime_seconds", "sequence_idle_timeout_seconds"),
        *("max_sequence_rows", "max_stream_sequence_rows", "shared_memory_idle_timeout_seconds"),
    )
)
"""Settings that take effect when the file changes; all others need a restart."""
REPEATED_OPTIONS = {"aliases": "--alias", "load_models": "--load-model"}
"""Options that are given once for each item of a list."""
NOT_IN_FILE = {"config_file": "", "api_key": "; set PREBLOCK_API_KEY, or api_keys_file"}
"""Settings that the file cannot have, and a hint."""
MAX_THREADS = 4096
"""Most workers, or threads of a call: more than the cores of a machine."""
MAX_SECONDS = 10**9
"""The longest time, about 30 years: timers cannot hold every integer."""
WholeSeconds = Annotated[int, Field(ge=1, le=MAX_SECONDS)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
LOG = logging.getLogger(__name__)


def _is_host(text: str) -> bool:
    """Return whether a text is a name or "*"; raise ValueError for other texts that are no addresses."""
    return re.fullmatch(r"\*|[A-Za-z0-9._-]+", text) is not None or bool(ip_address(text))


ITEMS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "reference_roots": (os.path.isabs, "absolute folders such as /srv/checkpoints"),
    "cors_origins": (re.compile(r"\*|https?://[^/\s,*]+").fullmatch, "origins such as https://pages.example, or *"),
    "allowed_hosts": (_is_host, "names or addresses without a port, such as models.example, or *"),
    "trusted_proxies": (ip_network, "addresses or networks such as 10.0.0.0/8"),
}
"""Settings with lists: a check, false for a bad item or with a ValueError, and examples of good items."""


def _default_cache_dir() -> Path:
    """Return the cache folder of this user (XDG Base Directory Specification)."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path("~/.cache")) / "preblock"


class Settings(BaseModel):
    """The settings of a process; docs/reference/settings.md lists them.

    An option wins over its environment variable, and the variable over the file `config_file`. An empty variable
    counts as unset.

    Args:
        options: settings by name, such as the options of the command line.

    Attributes:
        api_key: SHA-256 of the API key in hexadecimal digits; printing hides it.
        origins: by setting, where its value comes from: `--port`, `PREBLOCK_PORT`, the file, or `default`.

    Raises:
        Invalid: the file cannot be read, a name is unknown, or a value is not allowed; `field` names the origin.

    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    _options: dict[str, Any] = PrivateAttr()
    _origins: dict[str, str] = PrivateAttr()

    config_file: Path | None = Field(None, description="TOML file with further settings.")
    repository: Path = Field(Path("model_repository"), description="Folder of the artifacts.")
    reference_roots: str | None = Field(
        None, description="Comma-separated absolute folders of tables outside artifacts."
    )
    cache_dir: Path = Field(default_factory=_default_cache_dir, description="Folder of the cache of file hashes.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port of HTTP and WebSocket; 0 picks a free port.")
    grpc_port: int | None = Field(
        None, ge=0, le=65535, description="Port of gRPC; 0 picks a free port; unset: no gRPC."
    )
    uds: Path | None = Field(None, description="Unix socket of HTTP and WebSocket, in place of host and port.")
    grpc_uds: Path | None = Field(None, description="Unix socket of gRPC, in place of its port; for one worker.")
    provider: Literal["auto", "cpu", "cuda"] = Field("auto", description="Device; auto: CUDA for matrix products.")
    aliases: str | None = Field(None, description="Comma-separated NAME=MODEL: further names of models.")
    tei: str | None = Field(
        None, description="Model at the paths of text-embeddings-inference; unset: the only one that can answer."
    )
    model_control: Literal["none", "poll", "explicit"] = Field(
        "none", description="Source of model changes: none, the folder (poll), or load requests (explicit)."
    )
    load_models: str | None = Field(
        None, description="Comma-separated models to load at the start, if model_control is explicit; * for all."
    )
    model_poll_interval_seconds: Seconds = Field(
        5.0, description="Poll interval for model_control poll, and for tables outside artifacts."
    )
    model_open_timeout_seconds: Seconds = Field(60.0, description="Maximum time to open the graphs of a version.")
    workers: int = Field(1, ge=1, le=MAX_THREADS, description="Number of serving processes.")
    intra_op_threads: int = Field(1, ge=1, le=MAX_THREADS, description="Threads of one session call.")
    log_format: Literal["text", "json"] = Field("text", description="Format of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum log level.")
    access_log_sample_rate: float = Field(0.0, ge=0, le=1, description="Share of requests in the access log.")
    access_log_max_token_ids: int = Field(0, ge=0, le=4096, description="Maximum token ids in an access log line.")
    tracing: Literal["none", "otlp"] = Field("none", description="Export of spans; OTEL_… variables configure otlp.")
    api_key: SecretStr | None = Field(
        None, description="An API key with all rights; better as a variable, because `ps` shows options."
    )
    api_keys_file: Path | None = Field(None, description="TOML file of API keys; unset: no key is needed.")
    tls_cert_file: Path | None = Field(None, description="PEM file of the TLS certificate; unset: no TLS.")
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, without a password.")
    tls_client_ca: Path | None = Field(None, description="PEM file of client CAs; if set, clients need a certificate.")
    inspector: Literal["auto", "off", "on"] = Field("auto", description="Page /inspect; auto: on without API keys.")
    allowed_hosts: str | None = Field(
        None, description="Comma-separated hosts of requests; * for all; unset: loopback names on a loopback address."
    )
    cors_origins: str | None = Field(None, description="Comma-separated origins of allowed web pages; * for all.")
    trusted_proxies: str | None = Field(None, description="Comma-separated addresses or networks of trusted proxies.")
    gpu_mem_limit_bytes: int | None = Field(None, ge=1, description="GPU memory limit per graph; unset: no limit.")
    table_memory_budget_bytes: int | None = Field(
        None, ge=2**27, description="Maximum resident bytes of n-gram tables in a process; unset: no limit."
    )
    table_warm_up_file: Path | None = Field(
        None, description="`.npy` file of token ids whose n-gram rows are read at the start; unset: none."
    )
    header_timeout_seconds: WholeSeconds = Field(
        60, description="Maximum time of a TLS handshake, or of request headers."
    )
    body_timeout_seconds: WholeSeconds = Field(60, description="Maximum pause while a request body arrives.")
    shutdown_timeout_seconds: WholeSeconds = Field(
        15, description="Maximum time for open requests to end after SIGTERM."
    )
    max_body_bytes: int = Field(16 * 2**20, ge=1, description="Maximum size of a request body or stream message.")
    max_request_tokens: int = Field(65536, ge=1, description="Maximum tokens of a request.")
    max_queue_size: int = Field(64, ge=1, description="Maximum number of tasks waiting for a thread.")
    queue_timeout_seconds: Seconds = Field(30.0, description="Maximum time a task waits for a thread.")
    max_request_rows: int = Field(65536, ge=1, description="Maximum rows of a request.")
    max_buffered_response_bytes: int = Field(
        64 * 2**20, ge=8 * 2**20, description="Maximum bytes of vectors, as float32, in a response without streaming."
    )
    max_concurrent_requests: int = Field(1024, ge=1, description="Maximum concurrent requests of a process.")
    rate_limit_per_second: float | None = Field(
        None, ge=0.001, le=10**6, description="Maximum requests per second of a caller."
    )
    max_concurrent_streams: int = Field(1024, ge=1, description="Maximum open streams of a process.")
    stream_idle_timeout_seconds: WholeSeconds = Field(600, description="Maximum time a stream waits for its client.")
    stream_max_lifetime_seconds: WholeSeconds = Field(86400, description="Maximum time a stream stays open.")
    sequence_idle_timeout_seconds: WholeSeconds = Field(600, description="Maximum time between requests of a sequence.")
    max_sequence_rows: int = Field(65536, ge=1, description="Maximum rows of all sequences of a process.")
    max_stream_sequence_rows: int = Field(4096, ge=1, description="Maximum rows of the sequences of a gRPC stream.")
    max_shared_memory_bytes: int | None = Field(
        None, ge=1, description="Maximum bytes of regions in shared memory, with one worker; unset: no shared memory."
    )
    shared_memory_idle_timeout_seconds: WholeSeconds = Field(600, description="Maximum time between uses of a region.")

    def __init__(self, **options: Any) -> None:
        values, origins = _collect(options)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _explain(error, origins) from error
        # `preblock serve` forgets the variable of the key.
        self._options = options if self.api_key is None else options | {"api_key": self.api_key}
        self._origins = origins

    @property
    def reference_folders(self) -> list[Path]:
        """The folders in `reference_roots`."""
        return [Path(folder) for folder in split_list(self.reference_roots)]

    @property
    def has_inspector(self) -> bool:
        """Whether the page `/inspect` is served."""
        return self.inspector == "on" or (self.inspector == "auto" and not self.needs_key)

    @property
    def needs_key(self) -> bool:
        """Whether callers need an API key."""
        return self.api_key is not None or self.api_keys_file is not None

    @property
    def trusted_networks(self) -> list[str]:
        """The networks in `trusted_proxies`, and each IPv4 network as an IPv6 socket reports its addresses.

        Source: RFC 4291, section 2.5.5.2.
        """
        given = split_list(self.trusted_proxies)
        short = [network for network in map(ip_network, given) if network.version == 4]
        return [*given, *(f"::ffff:{network.network_address}/{network.prefixlen + 96}" for network in short)]

    @property
    def has_grpc(self) -> bool:
        """Whether gRPC is served, on a port or a Unix socket."""
        return self.grpc_port is not None or self.grpc_uds is not None

    @property
    def grpc_address(self) -> str | None:
        """The address of gRPC in the syntax of its clients; None without gRPC."""
        if self.grpc_uds is not None:
            return f"unix:{quote(str(self.grpc_uds.absolute()))}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return None if self.grpc_port is None else f"{host}:{self.grpc_port}"

    @property
    def origins(self) -> dict[str, str]:
        """Origin of each value."""
        return dict.fromkeys(Settings.model_fields, "default") | self._origins

    def reload(self) -> "Settings":
        """Read the environment and the file again, and return the settings with the same options.

        Raises:
            Invalid: as in the constructor.

        """
        return Settings(**self._options)

    def with_grpc_port(self, port: int) -> "Settings":
        """Return the settings with this port of gRPC, which `reload` keeps."""
        settings = self.model_copy(update={"grpc_port": port})
        settings._options = self._options | {"grpc_port": port}
        return settings

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:  # pydantic reads true as the number 1
            raise ValueError("a number")
        return value

    @field_validator("max_shared_memory_bytes")
    @classmethod
    def _check_workers(cls, size: int | None, info: ValidationInfo) -> int | None:
        workers = info.data.get("workers", 1)
        if size is not None and workers > 1:  # any of them may get the request that uses a region
            raise ValueError(f"no shared memory, because workers is {workers}; shared memory works with one worker")
        return size

    @field_validator("aliases")
    @classmethod
    def _check_aliases(cls, text: str | None) -> str | None:
        name = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
        if not all(re.fullmatch(f"{name}(/{name})*={name}", item) for item in split_list(text)):
            names = "names of letters, digits, '.', '_' and '-', NAME also with '/'"
            raise ValueError(f"NAME=MODEL, such as embeddings=gpt2-small; {names}")
        if len(read_aliases(text)) < len(split_list(text)):
            raise ValueError("each NAME once")
        return text

    @field_validator("load_models")
    @classmethod
    def _check_mode(cls, text: str | None, info: ValidationInfo) -> str | None:
        mode = info.data.get("model_control", "explicit")
        if text is not None and mode != "explicit":
            raise ValueError(f"no name, because model_control is {mode}; only with explicit are models loaded by name")
        return text

    @field_validator(*ITEMS)
    @classmethod
    def _check_items(cls, text: str | None, info: ValidationInfo) -> str | None:
        read, expected = ITEMS[info.field_name or ""]
        try:
            accepted = all(map(read, split_list(text)))
        except ValueError:
            accepted = False
        if not accepted:
            raise ValueError(f"comma-separated {expected}")
        return text


def split_list(text: str | None) -> list[str]:
    """Return the items of a comma-separated setting."""
    return [] if text is None else [item.strip() for item in text.split(",")]


def read_aliases(text: str | None) -> dict[str, str]:
    """Return the model of each name in the setting `aliases`."""
    return {name: model for name, _, model in (item.partition("=") for item in split_list(text))}


def option(name: str) -> str:
    """Return the command-line option of a setting."""
    return REPEATED_OPTIONS.get(name, "--" + name.replace("_", "-"))


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def _hash_key(key: str, origin: str) -> SecretStr:
    """Return the hash of an API key; no error shows the key."""
    if not re.fullmatch("[!-~]+", key):
        expected = "a key of visible ASCII characters, without spaces"
        raise Invalid(origin, "an empty text" if key == "" else "other characters", expected)
    return SecretStr(hashlib.sha256(key.encode()).hexdigest())


def _collect(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the given settings and the origin of each, from file, environment and `options`."""
    environment = {
        name.upper().removeprefix(PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.upper().startswith(PREFIX) and value
    }
    config = options.get("config_file", environment.get("config_file"))
    if config == "":
        raise Invalid(option("config_file"), "an empty text", "the path of a TOML file")
    file = {} if config is None else _read_file(Path(config))
    values = {**file, **environment, **options}
    origins = {
        **dict.fromkeys(file, str(config)),
        **{name: variable(name) for name in environment},
        **{name: option(name) for name in options},
    }
    if isinstance(key := values.get("api_key"), str):
        values["api_key"] = _hash_key(key, origins["api_key"])
    return values, origins


def _read_file(file: Path) -> dict[str, Any]:
    """Return the settings of a TOML file."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"the settings file {file} cannot be read: {str(error.strerror).lower()}"
        raise Invalid("config_file", str(file), "a readable TOML file", message=message) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or nested too deeply
        message = f"the settings file {file} is not valid TOML: {error}"
        raise Invalid("config_file", str(file), "a TOML file", message=message) from error
    for name, hint in NOT_IN_FILE.items():
        if name in document:
            message = f"{file}: a settings file cannot set {name}{hint}"
            raise Invalid(str(file), name, f"every setting except {name}", message=message)
    return document


def _explain(error: ValidationError, origins: Mapping[str, str]) -> Invalid:
    """Return the first error of a validation, with the origin of its setting."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    origin = origins[name]
    if first["type"] == "extra_forbidden":
        close = get_close_matches(name, Settings.model_fields, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        message = f"{origin}: there is no setting {name}; {hint}`preblock settings` lists all"
        return Invalid(origin, name, "a name listed by `preblock settings`", message=message)
    from_file = origin not in (option(name), variable(name))
    return Invalid(f"{name} in {origin}" if from_file else origin, *explain(first))


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of requests, by the current settings.

    Args:
        tokens: most tokens of all rows.
        rows: most rows.
        body_bytes: most bytes of its body or message.
        buffered_bytes: most bytes of vectors, as float32, in memory at once.
        concurrent: most requests at a time.
        rate: most requests of a caller per second; None for any number.

    """

    tokens: int
    rows: int
    body_bytes: int
    buffered_bytes: int
    concurrent: int = 2**63
    rate: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> "RequestLimits":
        """Return the limits that settings have."""
        return cls(
            settings.max_request_tokens,
            settings.max_request_rows,
            settings.max_body_bytes,
            settings.max_buffered_response_bytes,
            settings.max_concurrent_requests,
            settings.rate_limit_per_second,
        )


class LiveSettings:
    """The current settings. Readers keep this object, and read `current` when they need a value.

    Args:
        settings: at the start; a setting without reload keeps this value.
        log_changes: whether to log each change; default: only in a service with one worker.

    Attributes:
        current: the settings now; a new object after each change.
        requests: its limits of requests; reading an attribute of settings takes three times as long.

    """

    def __init__(self, settings: Settings, log_changes: bool | None = None) -> None:
        self.use(settings)
        self._log_changes = settings.workers == 1 if log_changes is None else log_changes
        file = settings.config_file
        self._watcher = None if file is None else FileWatcher("settings file", "settings", file)
        # The file may change before the first poll. A pipe, such as <(…) of a shell, can be read only once.
        if self._watcher is not None and file is not None and file.is_file():
            self._watcher.repeat()

    def use(self, settings: Settings) -> None:
        """Make `settings` the current ones."""
        self.current, self.requests = settings, RequestLimits.of(settings)

    async def watch(self) -> None:
        """Poll the file and reload it after each change, until cancelled."""
        while self._watcher is not None:
            await poll(self._load, self._change)

    def reload(self) -> bool:
        """Read the file if it has changed, and return whether a setting has changed; this may block.

        An invalid file changes nothing.
        """
        after = self._load()
        return after is not None and self._change(after)

    def _load(self) -> Settings | None:
        """Return the settings of a changed and valid file, else None."""
        file = self.current.config_file
        if self._watcher is None or file is None:
            return None

        def read() -> Settings:
            check_regular(file)
            return self.current.reload()

        return self._watcher.load(read, partial(self._log, logging.WARNING))

    def _change(self, after: Settings) -> bool:
        before = self.current
        changed = {name: value for name, value in after if value != getattr(before, name)}
        reloaded = {name: value for name, value in changed.items() if name in RELOADABLE}
        if late := [name for name in changed if name not in RELOADABLE]:
            text = "%s changed in %s: takes effect after a restart"
            self._log(logging.WARNING, text, ", ".join(late), before.config_file)
        if reloaded:
            self.use(before.model_copy(update=reloaded))
            logging.getLogger().setLevel(self.current.log_level.upper())
            text = ", ".join(f"{name} = {value}" for name, value in reloaded.items())
            self._log(logging.INFO, "settings reloaded: %s", text)
        return bool(reloaded)

    def _log(self, level: int, text: str, *values: object) -> None:
        if self._log_changes:
            LOG.log(level, text, *values)
