"""The lines that `preblock serve` prints: addresses, models, and commands to try."""

import json
from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Any

from preblock.cli.options import describe_limits
from preblock.service.artifacts.names import TOKENIZER

TEXT, IDS = {"text": "Hello, world!", "encoding": "float"}, {"input_ids": [[1, 2, 3]], "encoding": "float"}


def write_banner(settings: Any, address: str, models: Mapping[str, Any]) -> str:
    """Return the lines for a server that serves `models` on `address`."""
    lines = [f"Preblock serves on {address} (documentation: {address}/docs)"]
    lines += [f"  {name}: {describe_limits(model.manifest)}, {model.provider}" for name, model in models.items()]
    if settings.has_grpc:
        lines.append(f"gRPC on {settings.grpc_address}")
    if not models:
        lines.append(
            f"No model is loaded; POST {address}/v2/repository/models/NAME/load loads one of {settings.repository}"
            if settings.model_control == "explicit"
            else f"No model yet: the repository {settings.repository} is empty"
        )
    lines += ["Try:", *(f"  {command}" for command in _commands(settings, address, models))]
    return "\n".join(lines)


def _commands(settings: Any, address: str, models: Mapping[str, Any]) -> Iterator[str]:
    """Yield a command for the vectors of a model, of text if possible, and one for a sentence embedding."""
    # A URL cannot hold an alias with a slash.
    manifests = {name: model.manifest for name, model in models.items() if "/" not in name}
    tokens = [name for name, manifest in manifests.items() if manifest.kind == "tokens"]
    texts = [name for name in tokens if TOKENIZER in manifests[name].files]
    sentences = [name for name in texts if manifests[name].sentence is not None]
    if not models:
        yield _curl(settings, address, "/models")
    elif not tokens:
        yield _curl(settings, address, f"/v2/models/{next(iter(manifests))}")
    else:
        name = min(texts or tokens, key=lambda name: name in sentences)
        yield _curl(settings, address, f"/models/{name}/embed", TEXT if texts else IDS)
    if sentences:
        yield _curl(settings, address, "/v1/embeddings", {"model": sentences[0], "input": TEXT["text"]})


def _curl(settings: Any, address: str, path: str, body: Mapping[str, Any] | None = None) -> str:
    """Return a command that reaches a server on this machine; the user replaces KEY, client.pem and client.key."""
    options = ["curl"]
    if settings.uds is not None:
        options.append(f"--unix-socket {quote(str(settings.uds.absolute()))}")
        address = f"{address.partition('+')[0]}://localhost"
    # On this machine, a server on all addresses is reached through the loopback address.
    address = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    options.append(f"{address}{path}")
    if settings.tls_cert_file is not None:
        options.append("--insecure")  # the certificate need not hold the name of this address
    if settings.tls_client_ca is not None:
        options.append("--cert client.pem --key client.key")
    if settings.needs_key:
        options.append("-H 'Authorization: Bearer KEY'")
    if body is not None:
        options.append(f"-d '{json.dumps(body)}'")
    return " ".join(options)
