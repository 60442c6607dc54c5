"""Callers and their rights: the keys of a file, and the caller of the current request."""

import fnmatch
import hashlib
import hmac
import logging
import re
import secrets
import tomllib
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from preblock.service.core.errors import Forbidden, Invalid, Unauthenticated
from preblock.service.core.file_watch import FileWatcher

LOG = logging.getLogger(__name__)
SCHEME = b"bearer "
ALL = ("*",)


@dataclass(frozen=True)
class Principal:
    """Who asks.

    Args:
        name: of the key.
        models: in its scope: names, or patterns of the shell.
        admin: whether it may load and unload them.
        digest: SHA-256 of the key; empty where no key let it in.

    """

    name: str
    models: tuple[str, ...]
    admin: bool
    digest: bytes = b""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(fnmatch.translate, self.models)) or r"(?!)")

    def may_use(self, model: str) -> bool:
        """Return whether a model of this name is in the scope."""
        return self._pattern.match(model) is not None


NOBODY = Principal("nobody", (), admin=False)
SERVICE = Principal("service", ALL, admin=True)
"""The service itself, with every model in its scope."""
_CALLER: ContextVar[Principal] = ContextVar("caller", default=NOBODY)
"""A caller without a check is nobody: a forgotten check, or a thread, opens nothing."""


class KeyEntry(BaseModel):
    """The entry of a key in the file: never the key itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1)
    # Whoever reads the file must not be able to ask. A plain hash is enough for that: a key has 256 random bits, which
    # nobody finds by trying, unlike a password; and a slow one would be paid for by every request.
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    models: list[str] = Field(default=list(ALL), min_length=1)
    admin: bool = False


class KeyFile(BaseModel):
    """The file of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys: list[KeyEntry] = Field(min_length=1)


class Authenticator:
    """Authenticates callers, and checks their rights.

    Args:
        file: TOML, with the keys; read again when it changes. Default None: no key is needed, and all may do all.

    Attributes:
        changes: how often the keys have changed.

    Raises:
        Invalid: the file cannot be read, or is not understood.

    """

    def __init__(self, file: Path | None = None) -> None:
        self.changes = 0
        self._file = file
        self._callers: list[Principal] = []
        if file is not None:
            self._watch = FileWatcher(file)
            self._callers = read_keys(file)

    @property
    def needs_key(self) -> bool:
        """Whether a key is needed."""
        return self._file is not None

    def enter(self, authorization: bytes | None) -> None:
        """Set the caller of this context by the header `authorization`.

        Raises:
            Unauthenticated: it holds no key, or none of these.

        """
        _CALLER.set(NOBODY)
        if authorization is None:
            raise Unauthenticated("Authorization", "nothing", "Bearer and a key")
        if authorization[: len(SCHEME)].lower() != SCHEME:
            raise Unauthenticated("Authorization", "another scheme", "Bearer and a key")
        _CALLER.set(self._find(authorization[len(SCHEME) :].strip()))

    def came_from(self, address: str) -> None:
        """Name the caller of this context by its address, where no key is needed."""
        _CALLER.set(_anyone(address))

    def check_model(self, name: str, caller: Principal) -> None:
        """Raise Forbidden if `caller` may not use a model of this name, whether or not there is one."""
        if self._file is not None and not caller.may_use(name):
            raise Forbidden("model", name, f"a model that this key is for: {', '.join(caller.models)}")

    def check_admin(self, name: str, caller: Principal) -> None:
        """Raise Forbidden if `caller` may not load and unload a model of this name."""
        self.check_model(name, caller)
        if self._file is not None and not caller.admin:
            raise Forbidden("key", caller.name, "a key with admin = true, to load and unload models")

    def shows(self, name: str, caller: Principal) -> bool:
        """Return whether a list for `caller` holds a model of this name."""
        return self._file is None or caller.may_use(name)

    def _find(self, key: bytes) -> Principal:
        self.look()
        digest, found = hashlib.sha256(key).digest(), None
        # All of them, so that the time tells nothing about a near match.
        for caller in self._callers:
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        if found is None:
            raise Unauthenticated("Authorization", "a key that is not known", "Bearer and a key")
        return found

    def knows(self, caller: Principal) -> bool:
        """Return whether the keys still hold a caller with the same rights."""
        return caller in self._callers

    def look(self) -> None:
        """Read the file again if it has changed, at most once a second; a broken file changes nothing."""
        if self._file is None or not self._watch.changed():
            return
        try:
            self._callers = read_keys(self._file)
            self.changes += 1
        except Invalid as error:
            LOG.warning("the keys stay as they were: %s", error)


@lru_cache(maxsize=1024)
def _anyone(address: str) -> Principal:
    """Return the caller of an address, with all rights."""
    return Principal(address, ALL, admin=True)


EVERYBODY = Authenticator()
"""No key is needed."""


def caller() -> Principal:
    """Return the caller."""
    return _CALLER.get()


def caller_name() -> str:
    """Return the name of the caller: of its key, or its address."""
    return _CALLER.get().name


def read_keys(file: Path) -> list[Principal]:
    """Return the callers of a file of keys.

    Raises:
        Invalid: the file cannot be read, or is not understood.

    """
    try:
        document = KeyFile.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise Invalid("api_keys_file", str(file), f"a TOML file that can be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Invalid(
            "api_keys_file", f"{place} of {file}", f"what docs/operations.md shows ({first['msg']})"
        ) from error
    except ValueError as error:  # no UTF-8, or no TOML
        raise Invalid("api_keys_file", str(file), f"a TOML file ({error})") from error
    for field in ("name", "sha256"):
        values = [getattr(entry, field) for entry in document.keys]
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise Invalid("api_keys_file", f"{field} {twice} twice", "each once")
    return [
        Principal(entry.name, tuple(entry.models), entry.admin, bytes.fromhex(entry.sha256)) for entry in document.keys
    ]


def new_key(name: str, models: tuple[str, ...], admin: bool) -> tuple[str, str]:
    """Return a new key of 256 random bits, and its entry of the file; without `models`, for all."""
    key = secrets.token_urlsafe(32)
    lines = ["[[keys]]", f"name = {_toml(name)}", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    if models:
        lines.append(f"models = [{', '.join(map(_toml, models))}]")
    if admin:
        lines.append("admin = true")
    return key, "\n".join(lines) + "\n"


def _toml(text: str) -> str:
    """Return a basic string of TOML."""
    escaped = "".join(f"\\u{ord(sign):04x}" if sign < " " or sign in '"\\\x7f' else sign for sign in text)
    return f'"{escaped}"'
