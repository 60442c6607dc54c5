"""Preblock as an application of Ray Serve: `serve run preblock_ray:build repository=/models`."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application, Deployment


def build(args: Mapping[str, Any]) -> Application:
    """Return the application; `args` are settings of the service by name, such as `repository`."""
    return deployment(args).bind()


def deployment(settings: Mapping[str, Any]) -> Deployment:
    """Return the deployment. Each replica builds its own application, because open models cannot be pickled.

    Raises:
        Invalid: a setting needs the service's own sockets or processes.
        ValidationError: a setting is unknown, or has an illegal value.

    """
    from preblock.service.core.errors import Invalid
    from preblock.service.core.settings import Settings

    checked = Settings(**settings)
    if checked.workers != 1:
        raise Invalid("workers", checked.workers, "1: Ray starts replicas instead")
    if checked.has_grpc:
        raise Invalid("grpc_port", checked.grpc_port, "none: Ray's proxy serves HTTP")

    def create() -> Any:
        from preblock.service.app import create_app

        application = create_app(checked)

        async def with_bytes(scope: Any, receive: Any, send: Any) -> None:
            """Serve a request, and send bytes only: Ray pickles the messages, and a memoryview cannot be pickled."""

            async def send_bytes(message: dict[str, Any]) -> None:
                copied = {name: bytes(value) for name, value in message.items() if isinstance(value, memoryview)}
                await send(message | copied)

            await application(scope, receive, send_bytes)

        return with_bytes

    @serve.deployment(
        name="preblock",
        ray_actor_options={"num_cpus": 1},
        # The service has its own limit, and rejects requests over it with 503 and Retry-After.
        max_ongoing_requests=2 * checked.max_concurrent_requests,
        graceful_shutdown_wait_loop_s=1,
        graceful_shutdown_timeout_s=25,
        health_check_period_s=5,
        health_check_timeout_s=15,
        autoscaling_config={"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 4},
    )
    @serve.ingress(create)
    class Preblock:
        """The service in a replica."""

        async def check_health(self) -> None:
            """Answer on the event loop of the requests: if it is blocked, Ray replaces the replica."""

    return Preblock
