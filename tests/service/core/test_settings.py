"""Settings: defaults, environment, ranges."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from preblock.service.core.errors import Invalid
from preblock.service.core.settings import Settings, variable


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"PREBLOCK_{name.upper()}", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_trusted_networks_include_mapped_ipv4_networks() -> None:
    settings = Settings(trusted_proxies="10.0.0.0/8, fe80::1%eth0")
    assert settings.trusted_networks == ["10.0.0.0/8", "fe80::1%eth0", "::ffff:10.0.0.0/104"]


FROM_ONE = [
    *("max_shared_memory_bytes", "max_body_bytes", "max_queue_size", "queue_timeout_seconds", "max_request_rows"),
    *("max_concurrent_requests", "max_concurrent_streams", "stream_idle_timeout_seconds", "max_sequence_rows"),
    *("stream_max_lifetime_seconds", "max_stream_sequence_rows"),
]
"""Settings that take 1, and not 0."""
VARIABLES: list[tuple[str, str, Any]] = [
    ("repository", "/models", Path("/models")),
    ("reference_roots", "/srv/a, /srv/b", "/srv/a, /srv/b"),
    ("port", "0", 0),
    ("port", "65535", 65535),
    ("max_buffered_response_bytes", "8388608", 8388608),
    ("grpc_port", "9001", 9001),
    ("grpc_uds", "/run/grpc.sock", Path("/run/grpc.sock")),
    ("api_key", "key", SecretStr(sha256(b"key").hexdigest())),
    ("api_keys_file", "/keys.toml", Path("/keys.toml")),
    ("tls_key", "/a.key", Path("/a.key")),
    ("tls_client_ca", "/ca.pem", Path("/ca.pem")),
    ("table_memory_budget_bytes", "134217728", 2**27),
    ("table_warm_up_file", "/srv/ids.npy", Path("/srv/ids.npy")),
    ("uds", "/run/http.sock", Path("/run/http.sock")),
    ("aliases", "a=gpt, b.1/c-d=bert-2", "a=gpt, b.1/c-d=bert-2"),
    ("tei", "wordllama:1", "wordllama:1"),
    ("access_log_max_token_ids", "8", 8),
    ("tls_cert_file", "/a.pem", Path("/a.pem")),
    ("gpu_mem_limit_bytes", "1000000000", 10**9),
    ("cors_origins", "https://a.example, http://b:8000", "https://a.example, http://b:8000"),
    ("allowed_hosts", "models.example, 10.0.0.1, fd00::1", "models.example, 10.0.0.1, fd00::1"),
    ("trusted_proxies", "10.0.0.0/8, ::1", "10.0.0.0/8, ::1"),
    ("rate_limit_per_second", "0.5", 0.5),
    *((name, "1", 1) for name in ("max_request_tokens", *FROM_ONE)),
]
"""Settings as the environment has them, and what they are then: of each type and each check."""


def test_settings_are_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text, value in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(f"PREBLOCK_{name.upper()}", text)
            assert getattr(Settings(), name) == value, name


def test_every_setting_reads_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = Settings().model_dump(exclude_none=True)
    for name, value in defaults.items():
        monkeypatch.setenv(f"PREBLOCK_{name.upper()}", str(value))
    settings: Any = Settings()
    assert settings.model_dump(exclude_none=True) == defaults
    assert {*defaults, *(name for name, *_ in VARIABLES), "config_file", "load_models"} == set(Settings.model_fields)
    assert {name for name in defaults if settings.origins[name] != variable(name)} <= {
        name for name, value in defaults.items() if value == ""
    }


INVALID = {
    "port": ("-1", "65536", "x"),
    "grpc_port": ("-1", "65536"),
    "provider": ("gpu", "CUDA"),
    "tracing": ("console",),
    "inspector": ("yes",),
    "workers": ("0", "4097"),
    "intra_op_threads": ("0", "4097"),
    "max_request_tokens": ("0", "1.5"),
    "aliases": ("a", "a=b=c", "=gpt", "/b=gpt", "a/=gpt", "a//b=gpt", "a/.b=gpt", "a=b/c", "a=gpt,", "a=gpt,a=bert"),
    "reference_roots": ("checkpoints", "/srv,"),
    "allowed_hosts": ("a.example:80", "https://a.example", "[::1]", "*.example", "a.example,", "abc:80"),
    "cors_origins": ("a.example", "https://a.example/", "https://*.example", "https://a.example,"),
    "trusted_proxies": ("*", "proxy.example", "10.0.0.1/8"),
    "max_buffered_response_bytes": ("8388607",),
    "rate_limit_per_second": ("0", "-1", "1e-310", "inf"),
} | dict.fromkeys(FROM_ONE, ("0",))


def test_invalid_setting_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {name: ("1000000001", "1" + 400 * "0") for name in Settings.model_fields if name.endswith("_seconds")}
    for name, texts in [*INVALID.items(), *seconds.items()]:
        for text in texts:
            monkeypatch.setenv(f"PREBLOCK_{name.upper()}", text)
            with pytest.raises(Invalid) as refused:
                Settings()
            assert (refused.value.field, refused.value.got[:80]) == (variable(name), text[:80]), (name, text)
        monkeypatch.delenv(f"PREBLOCK_{name.upper()}")
    monkeypatch.setenv("PREBLOCK_PROT", "1")
    with pytest.raises(Invalid, match="PREBLOCK_PROT: there is no setting prot; did you mean port"):
        Settings()


def test_cache_dir_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, cache in (("/home/me/cache", "/home/me/cache"), ("", "~/.cache"), ("relative", "~/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert Settings().cache_dir == Path(cache) / "preblock"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "preblock.toml"
    path.write_text('port = 1\nhost = "::1"\nrepository = "/srv/models"\n')
    return path


def test_option_overrides_variable_overrides_file(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("PREBLOCK_CONFIG_FILE", str(file))
    monkeypatch.setenv("PREBLOCK_HOST", "::2")
    monkeypatch.setenv("PREBLOCK_PORT", "2")
    monkeypatch.setenv("PREBLOCK_WORKERS", "")
    settings: Any = Settings(port="3")
    origins = settings.origins
    assert (settings.port, settings.host, settings.repository) == (3, "::2", Path("/srv/models"))
    expected = {"port": "--port", "host": "PREBLOCK_HOST", "repository": str(file), "workers": "default"}
    assert {name: origins[name] for name in expected} == expected
    assert origins["config_file"] == "PREBLOCK_CONFIG_FILE"


INVALID_FILES = [
    ("prot = 1", "{file}: there is no setting prot; did you mean port? `preblock settings` lists all"),
    ("port = 'x'", "port in {file}: got x, expected a whole number"),
    ("api_keys_file = ['x']", "api_keys_file in {file}: got ['x'], expected a path"),
    ("grpc_port = true", "grpc_port in {file}: got True, expected a number"),
    ("queue_timeout_seconds = false", "queue_timeout_seconds in {file}: got False, expected a number"),
    ("inspector = true", "inspector in {file}: got True, expected 'auto', 'off' or 'on'"),
    ("tls_key = true", "tls_key in {file}: got True, expected a path"),
    ("port =", "the settings file {file} is not valid TOML: Invalid value (at end of document)"),
    ("config_file = 'other.toml'", "{file}: a settings file cannot set config_file"),
    ("api_key = 'key'", "{file}: a settings file cannot set api_key; set PREBLOCK_API_KEY, or api_keys_file"),
]


def test_invalid_settings_file_is_rejected(file: Path) -> None:
    for text, message in INVALID_FILES:
        file.write_text(text)
        with pytest.raises(Invalid) as refused:
            Settings(config_file=file)
        assert str(refused.value) == message.format(file=file)
    with pytest.raises(Invalid, match="cannot be read: no such file or directory"):
        Settings(config_file=file.parent / "nothing.toml")


def test_empty_option_for_settings_file_is_rejected(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """A script with an unset variable would otherwise start a server without its keys."""
    monkeypatch.setenv("PREBLOCK_CONFIG_FILE", str(file))
    with pytest.raises(Invalid, match=r"^--config-file: got an empty text, expected the path of a TOML file$"):
        Settings(config_file="")


def test_key_survives_reload_without_its_variable(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("PREBLOCK_API_KEY", "my-key")
    settings = Settings(config_file=file)
    monkeypatch.delenv("PREBLOCK_API_KEY")
    assert settings.reload().api_key == settings.api_key == SecretStr(sha256(b"my-key").hexdigest())
    assert "my-key" not in repr(vars(settings)) + repr(settings) + str(settings)


def test_unusable_key_is_rejected_without_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREBLOCK_API_KEY", "my key")
    message = "got other characters, expected a key of visible ASCII characters, without spaces"
    with pytest.raises(Invalid, match=f"^PREBLOCK_API_KEY: {message}$"):
        Settings()
    with pytest.raises(Invalid, match=r"^--api-key: got an empty text, expected a key"):
        Settings(api_key="")


def test_free_grpc_port_survives_reload(file: Path) -> None:
    settings = Settings(config_file=file, grpc_port="0").with_grpc_port(7)
    file.write_text("port = 2")
    reloaded = settings.reload()
    assert (reloaded.grpc_port, reloaded.grpc_address, reloaded.port) == (7, "127.0.0.1:7", 2)


def test_shared_memory_needs_one_worker() -> None:
    with pytest.raises(Invalid) as raised:
        Settings(max_shared_memory_bytes=4096, workers=2)
    assert (raised.value.field, raised.value.got) == ("--max-shared-memory-bytes", "4096")
    assert Settings(max_shared_memory_bytes=4096).max_shared_memory_bytes == 4096
