"""The file of keys, and what their holders may use."""

import asyncio
import contextvars
import hashlib
import logging
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from preblock.service.core.auth import SERVICE, Authenticator, caller, new_key, read_keys
from preblock.service.core.errors import Forbidden, Invalid, Unauthenticated

DIGEST = hashlib.sha256(b"key").hexdigest()
ENTRY = f'[[keys]]\nname = "one"\nsha256 = "{DIGEST}"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(ENTRY)
    return path


def enter(access: Authenticator, authorization: bytes | None, model: str = "gpt", admin: bool = False) -> None:
    """Let in and check in a context of its own, as each request has one."""

    def request() -> None:
        access.authenticate(authorization)
        (access.check_admin if admin else access.check_model)(model, caller(), model)

    contextvars.copy_context().run(request)


def test_listed_and_single_key_are_accepted(file: Path) -> None:
    key = hashlib.sha256(b"single").hexdigest()
    for access in (Authenticator(key=key), Authenticator(file, key)):
        assert access.needs_key
        enter(access, b"Bearer single", "gpt", admin=True)
        with pytest.raises(Unauthenticated):
            enter(access, b"Bearer other")
    for authorization in (b"Bearer key", b"bearer key", b"BEARER   key "):
        enter(access, authorization)


def test_invalid_authorization_is_rejected_without_echo(file: Path) -> None:
    access = Authenticator(file)
    unknown = (b"Bearer ", b"Bearer Key", b"Bearer key key", b"Bearer " + DIGEST.encode(), b"Bearer \xff\x00")
    refused: list[tuple[bytes | None, str]] = [
        (None, "is missing"),
        *((scheme, "has another scheme") for scheme in (b"", b"key", b"Basic key", b"Bearer")),
        *((key, "is unknown") for key in unknown),
    ]
    for authorization, reason in refused:
        with pytest.raises(Unauthenticated, match=rf"header Authorization {reason}; send Bearer and a key$"):
            enter(access, authorization)


def test_unauthenticated_caller_is_rejected_everywhere(file: Path) -> None:
    access = Authenticator(file)
    access.check_model("gpt", SERVICE, "gpt")
    for _ in range(2):
        assert not access.shows("gpt", caller())
        with pytest.raises(Forbidden):
            access.check_model("gpt", caller(), "gpt")
        access.authenticate(b"Bearer key")
        assert access.shows("gpt", caller())
        with pytest.raises(Unauthenticated):
            access.authenticate(b"Bearer no")


def test_key_scope_supports_names_and_patterns(file: Path) -> None:
    for models, model, allowed in (
        ('["gpt"]', "gpt", True),
        ('["gpt"]', "gpt2", False),
        ('["gpt"]', "a-gpt", False),
        ('["bert", "gpt*"]', "gpt2", True),
        ('["gpt?"]', "gpt", False),
        ('["[ab]c"]', "bc", True),
        ('["*"]', "anything", True),
        ('["GPT"]', "gpt", False),
        ('["gpt"]', "gpt\n", False),
    ):
        file.write_text(f"{ENTRY}models = {models}\n")
        with nullcontext() if allowed else pytest.raises(Forbidden, match=r"^this key may not use the model (gpt|a-g)"):
            enter(Authenticator(file), b"Bearer key", model)


def test_only_admin_key_may_change_its_models(file: Path) -> None:
    with pytest.raises(Forbidden, match="the key 'one' may not load and unload models; that needs"):
        enter(Authenticator(file), b"Bearer key", admin=True)
    file.write_text(f'{ENTRY}admin = true\nmodels = ["bert"]\n')
    enter(Authenticator(file), b"Bearer key", "bert", admin=True)
    with pytest.raises(Forbidden, match="this key may not use the model gpt"):
        enter(Authenticator(file), b"Bearer key", "gpt", admin=True)


INVALID: list[tuple[str | bytes | None, str]] = [
    *((text, "keys of keys.toml") for text in ("", "keys = []", "keys = 3")),
    ("[[keys", "keys.toml is no TOML file: "),
    (b"\xff", "keys.toml is no TOML file: "),
    (None, "keys.toml cannot be read: No such file"),
    ('[[keys]]\nname = "x"', "keys.0.sha256 of keys.toml"),
    (ENTRY.replace(DIGEST, "key"), "keys.0.sha256 of keys.toml"),
    (ENTRY.replace(DIGEST, DIGEST.upper()), "keys.0.sha256 of keys.toml"),
    (ENTRY + "models = []", "keys.0.models of keys.toml"),
    (ENTRY + 'models = "gpt"', "keys.0.models of keys.toml"),
    (ENTRY + 'admin = "no"', "keys.0.admin of keys.toml"),
    (ENTRY + 'key = "key"', "keys.0.key of keys.toml"),
    (ENTRY.replace('"one"', '""'), "keys.0.name of keys.toml"),
    (ENTRY + ENTRY.replace(DIGEST, "0" * 64), "two entries have the name one"),
    (ENTRY + ENTRY.replace("one", "two"), f"two entries have the sha256 {DIGEST}"),
]


def test_invalid_key_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("keys.toml")
    for text, message in INVALID:
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(Invalid) as refused:
            Authenticator(file)
        assert message[:70] in str(refused.value), text
        assert refused.value.field == "api_keys_file"


def test_key_file_is_reloaded_unless_broken(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = Authenticator(file)
    enter(access, b"Bearer key")
    for damage in (partial(file.write_text, "[[keys"), file.unlink, partial(os.mkfifo, file)):
        damage()
        with caplog.at_level(logging.WARNING):
            asyncio.run(access.poll())
            enter(access, b"Bearer key")
    rejected = "API key file rejected, keeping the previous keys"
    assert [record.message.partition(":")[0] for record in caplog.records] == [rejected] * 3
    other = file.with_suffix(".tmp")
    other.write_text(ENTRY.replace(DIGEST, hashlib.sha256(b"new").hexdigest()))
    other.replace(file)
    enter(access, b"Bearer key")
    with caplog.at_level(logging.INFO):
        asyncio.run(access.poll())
    assert caplog.messages[-1] == "API keys reloaded: 1 keys, before 1"
    enter(access, b"Bearer new")
    with pytest.raises(Unauthenticated):
        enter(access, b"Bearer key")


def test_new_key_is_accepted_under_its_entry(file: Path) -> None:
    for name in ("alice", 'quo"te\\', "new\nline", "ä"):
        key, entry = new_key(name, ("bert", "gpt*"), admin=True)
        assert (len(key), key in entry) == (43, False)
        file.write_text(entry + new_key("other", (), admin=False)[1])
        caller, other = read_keys(file)
        assert (caller.name, caller.models, caller.admin) == (name, ("bert", "gpt*"), True)
        assert (other.models, other.admin) == (("*",), False)
        enter(Authenticator(file), f"Bearer {key}".encode())
        assert new_key(name, (), admin=False)[0] != key
