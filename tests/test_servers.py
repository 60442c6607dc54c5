import httpx

from tests.conftest import Server


def test_servers(server: Server, tiny_server: Server) -> None:
    for running in (server, tiny_server):
        assert httpx.get(running.address + "/readyz").status_code == 200
