"""`GET /`, `/inspect` and `/docs`: the pages for browsers."""

import re
from pathlib import Path

import httpx
import pytest

from preblock.service.api.http.routes.pages import ASSETS
from preblock.service.core.auth import new_key
from preblock.service.core.settings import Settings
from tests.service.api.conftest import Keyed
from tests.support.servers import serve

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"

MAX_LOADED_BYTES = 150_000


def test_root_redirects_only_browsers_to_inspector(tiny_http: httpx.Client) -> None:
    for accept in (BROWSER, "text/html", "TEXT/HTML;q=0.1"):
        answer = tiny_http.get("/", headers={"Accept": accept})
        assert (answer.status_code, answer.headers["location"], answer.headers["vary"]) == (307, "/inspect", "Accept")
    for accept in ("*/*", "application/json", "", "text/html;q=0", "text/html;q=many", "text/*"):
        answer = tiny_http.get("/", headers={"Accept": accept})
        assert (answer.status_code, answer.json()["inspector"]) == (200, "/inspect"), accept


@pytest.mark.parametrize("path", ["/inspect", "/inspect/page.js"])
def test_inspector_files_have_strict_headers_and_etag(path: str, tiny_http: httpx.Client) -> None:
    answer = tiny_http.get(path)
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    tag = answer.headers["etag"]
    for tags in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = tiny_http.get(path, headers={"If-None-Match": tags})
        assert (again.status_code, again.content) == (304, b"")
    lines = [("If-None-Match", '"other"'), ("If-None-Match", tag)]
    assert tiny_http.get(path, headers=lines).status_code == 304
    assert tiny_http.get(path, headers={"If-None-Match": '"other"'}).content == answer.content


def test_other_inspector_files_are_not_found(tiny_http: httpx.Client) -> None:
    for name in ("pages.py", "..%2Froutes%2Fpages.py", "../routes/pages.py", "INDEX.HTML"):
        assert tiny_http.get(f"/inspect/{name}").status_code == 404, name


def test_inspector_files_are_local_and_preloaded(tiny_http: httpx.Client) -> None:
    """A module outside of the preloads would delay the page by a round trip."""
    page = tiny_http.get("/inspect").text
    addresses = re.findall(r'(?:href|src)="(/inspect/[^"]+)"', page)
    assert {address.rpartition("/")[2] for address in addresses} == {file.name for file in ASSETS.iterdir()} - {
        "index.html"
    }
    assert not [file.name for file in ASSETS.iterdir() if re.search(r"https?://(?!www\.w3\.org/)", file.read_text())]
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) < MAX_LOADED_BYTES


def test_docs_allow_only_their_own_files(tiny_http: httpx.Client) -> None:
    answer = tiny_http.get("/docs")
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    policy = answer.headers["content-security-policy"]
    (scripts,) = re.findall(r"script-src ([^;]+);", policy)
    assert re.fullmatch(r"'self' 'sha256-[A-Za-z0-9+/=]{44}'", scripts)
    assert policy.startswith("default-src 'none';")
    for part in re.findall(r'(?:href|src)="([^"]+)"', answer.text):
        assert (part.startswith("/docs/static/"), tiny_http.get(part).status_code) == (True, 200)


def test_keys_disable_inspector_unless_enabled(keyed: Keyed, tiny_repository: Path, tmp_path: Path) -> None:
    secret, entry = new_key("alice", (), False)
    (tmp_path / "keys.toml").write_text(entry)
    options = ("--api-keys-file", str(tmp_path / "keys.toml"), "--inspector", "on")
    with serve(tiny_repository, *options) as enabled:
        check_inspector(keyed.address, keyed.headers, shown=False)
        check_inspector(enabled.address, {"Authorization": f"Bearer {secret}"}, shown=True)


def check_inspector(address: str, key: dict[str, str], shown: bool) -> None:
    with httpx.Client(base_url=address) as client:
        for path in ("/inspect", "/inspect/page.js"):
            assert client.get(path).status_code == (200 if shown else 404)
        assert client.get("/", headers={"Accept": BROWSER}).status_code == (307 if shown else 401)
        assert [client.get(path).status_code for path in ("/", "/models")] == [401, 401]
        assert client.get("/", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/", headers=key).json()["inspector"] == ("/inspect" if shown else None)


def test_inspector_can_be_disabled_without_keys() -> None:
    assert [Settings(inspector=choice).has_inspector for choice in ("auto", "on", "off")] == [True, True, False]
