"""Callers and their rights: the API keys, and the caller of the current request."""

import hashlib
import hmac
import json
import logging
import secrets
import tomllib
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from preblock.service.core.errors import Forbidden, Invalid, Unauthenticated, shorten
from preblock.service.core.file_watch import FileWatcher, poll, read_watched

LOG = logging.getLogger(__name__)
SCHEME = b"bearer "
ALL = ("*",)
API_KEY = "PREBLOCK_API_KEY"
"""Name of the caller with the key of the setting `api_key`."""


@dataclass(frozen=True)
class Principal:
    """A caller and its rights.

    Args:
        name: name of its key, or its address.
        models: names and shell patterns of the models it may use.
        admin: whether it may load and unload these models.
        digest: SHA-256 of its key; empty without a key.

    """

    name: str
    models: tuple[str, ...]
    admin: bool
    digest: bytes = b""

    def may_use(self, model: str) -> bool:
        """Return whether the name `model` is in the scope."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)


NOBODY = Principal("nobody", (), admin=False)
SERVICE = Principal("service", ALL, admin=True)
"""The service itself, with every model in its scope."""
_CALLER: ContextVar[Principal] = ContextVar("caller", default=NOBODY)
"""The default has no rights, so that a forgotten check or a new thread grants none."""


class KeyEntry(BaseModel):
    """The entry of a key in the file. The file never holds the key itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1)
    # The hash keeps readers of the file from using the key. A fast hash is enough: unlike a password, a key of 256
    # random bits cannot be guessed. Every request pays for the hash.
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    models: list[str] = Field(default=list(ALL), min_length=1)
    admin: bool = False


class KeyFile(BaseModel):
    """The document of an API key file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys: list[KeyEntry] = Field(min_length=1)


class Authenticator:
    """Authenticates callers and checks their rights.

    Without a file and a key, no key is needed, and every caller has all rights.

    Args:
        file: TOML file of the keys; a pipe is refused. Default None: no file.
        key: SHA-256 of a further key with all rights, in hexadecimal digits. Default None: no such key.

    Attributes:
        changes: number of reloads.
        needs_key: whether callers need a key.

    Raises:
        Invalid: the file cannot be read, or has an invalid entry.

    """

    def __init__(self, file: Path | None = None, key: str | None = None) -> None:
        self.changes = 0
        self._file = file
        self._own = [] if key is None else [Principal(API_KEY, ALL, admin=True, digest=bytes.fromhex(key))]
        self._callers = self._own
        self.needs_key = file is not None or key is not None
        if file is not None:
            self._watcher = FileWatcher("API key file", "keys", file)
            self._callers = [*self._own, *read_keys(file)]

    def authenticate(self, authorization: bytes | None) -> None:
        """Set the caller of this context from the header `authorization`.

        Raises:
            Unauthenticated: the header is missing, or has no known key.

        """
        _CALLER.set(NOBODY)
        if authorization is None:
            message = "the header Authorization is missing; send Bearer and a key"
            raise Unauthenticated("Authorization", "nothing", "Bearer and a key", message=message)
        if authorization[: len(SCHEME)].lower() != SCHEME:
            message = "the header Authorization has another scheme; send Bearer and a key"
            raise Unauthenticated("Authorization", "another scheme", "Bearer and a key", message=message)
        _CALLER.set(self._find(authorization[len(SCHEME) :].strip()))

    def identify(self, address: str) -> None:
        """Set the caller of this context to its address, in a service without keys."""
        _CALLER.set(_principal_of(address))

    def check_model(self, name: str, caller: Principal, requested: str) -> None:
        """Raise Forbidden if `caller` may not use a model of this name, whether or not the model exists.

        The error has only the name in the request, `requested`: not every caller may know the model of an alias.
        """
        if not self.shows(name, caller):
            allowed = ", ".join(caller.models)
            message = f"this key may not use the model {shorten(requested)}; it may use {allowed}"
            if caller.may_use(requested):
                message = f"this key lists the alias {requested}, but not its model; list both"
            raise Forbidden("model", requested, f"a model in the scope of this key: {allowed}", message=message)

    def check_admin(self, name: str, caller: Principal, requested: str) -> None:
        """Raise Forbidden if `caller` may not load and unload a model of this name; `requested` as in `check_model`."""
        self.check_model(name, caller, requested)
        if self.needs_key and not caller.admin:
            message = f"the key {caller.name!r} may not load and unload models; that needs a key with admin = true"
            raise Forbidden("key", caller.name, "a key with admin = true", message=message)

    def shows(self, name: str, caller: Principal) -> bool:
        """Return whether lists for `caller` hold a model of this name."""
        return not self.needs_key or caller.may_use(name)

    def knows(self, caller: Principal) -> bool:
        """Return whether the key of `caller` is still valid, with the same rights."""
        return caller in self._callers

    async def poll(self) -> None:
        """After a second, read the file if it has changed; an invalid file changes nothing."""
        await poll(self._load, self._use)

    def _load(self) -> list[Principal] | None:
        """Return the callers of a changed and valid file, else None."""
        file = self._file
        return None if file is None else self._watcher.load(lambda: [*self._own, *read_keys(file)], LOG.warning)

    def _use(self, callers: list[Principal]) -> None:
        # A file that was cut between two entries is valid. The numbers let an operator see it.
        LOG.info("API keys reloaded: %d keys, before %d", len(callers), len(self._callers))
        self._callers = callers
        self.changes += 1

    def _find(self, key: bytes) -> Principal:
        digest = hashlib.sha256(key).digest()
        # Compares all of them in constant time, so that the duration reveals nothing about a near match.
        found = [caller for caller in self._callers if hmac.compare_digest(caller.digest, digest)]
        if not found:
            message = "the key in the header Authorization is unknown; send Bearer and a key"
            raise Unauthenticated("Authorization", "an unknown key", "Bearer and a key", message=message)
        return found[0]


@lru_cache(maxsize=1024)
def _principal_of(address: str) -> Principal:
    """Return the caller of an address, with all rights."""
    return Principal(address, ALL, admin=True)


EVERYBODY = Authenticator()
"""Authenticator of a service without keys."""


def caller() -> Principal:
    """Return the caller of this context."""
    return _CALLER.get()


def read_keys(file: Path) -> list[Principal]:
    """Return the callers of an API key file.

    Raises:
        Invalid: the file cannot be read, or has an invalid entry.

    """
    try:
        document = KeyFile.model_validate(tomllib.loads(read_watched(file).decode()))
    except OSError as error:
        message = f"api_keys_file: {file} cannot be read: {error.strerror}"
        raise Invalid("api_keys_file", str(file), "a readable TOML file", message=message) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        got = f"{'.'.join(map(str, first['loc']))} of {file}"
        message = f"api_keys_file: {got} is wrong ({first['msg']}); docs/production.md shows an entry"
        raise Invalid("api_keys_file", got, "an entry as in docs/production.md", message=message) from error
    except ValueError as error:  # not UTF-8, or not TOML
        message = f"api_keys_file: {file} is no TOML file: {error}"
        raise Invalid("api_keys_file", str(file), "a TOML file", message=message) from error
    for field in ("name", "sha256"):
        [(value, count)] = Counter(getattr(entry, field) for entry in document.keys).most_common(1)
        if count > 1:
            message = f"api_keys_file: two entries have the {field} {value}"
            raise Invalid("api_keys_file", f"{field} {value} twice", "each once", message=message)
    return [
        Principal(entry.name, tuple(entry.models), entry.admin, bytes.fromhex(entry.sha256)) for entry in document.keys
    ]


def new_key(name: str, models: tuple[str, ...], admin: bool) -> tuple[str, str]:
    """Return a new key of 256 random bits, and its entry for the file. Empty `models` allow all models."""
    key = secrets.token_urlsafe(32)
    lines = ["[[keys]]", f"name = {_toml(name)}", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    if models:
        lines.append(f"models = [{', '.join(map(_toml, models))}]")
    if admin:
        lines.append("admin = true")
    return key, "\n".join(lines) + "\n"


def _toml(text: str) -> str:
    """Return a basic string of TOML: a JSON string with DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
