"""The body of `GET /`."""

from pydantic import Field

from preblock.service.api.http.schemas.common import Documented


class HealthPaths(Documented):
    """Paths for an orchestrator."""

    live: str = "/livez"
    ready: str = "/readyz"


class ProtocolPaths(Documented):
    """Where each protocol is served."""

    native: str = "/models/{name}/embed"
    decode: str = "/models/{name}/decode"
    openai: str = "/v1"
    open_inference: str = "/v2"
    grpc_port: int | None = Field(
        None, description="Port of the Open Inference Protocol over gRPC; null without a port."
    )


class ServiceIndex(Documented):
    """The addresses of the service, and the machine behind them."""

    name: str = "preblock"
    version: str
    workers: int = Field(description="Number of serving processes.")
    machine: str = Field(description="Processor, number of usable cores, and operating system.")
    docs: str = "/docs"
    inspector: str | None = Field(description="Page that shows the models; null if off.")
    openapi: str = "/openapi.json"
    models: str = "/models"
    protocols: ProtocolPaths
    health: HealthPaths
    metrics: str = "/metrics"
