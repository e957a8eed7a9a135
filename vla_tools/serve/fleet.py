"""A fleet on Ray Serve: replicas of a policy behind one door, and the file that deploys them.

`ingress` speaks openpi's wire in front of `fleet_policies.policies`; `serve deploy` finds both by
their `import_path`. Imported only when a fleet is asked for.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp

from vla_runtime.files.quotes import one_line
from vla_runtime.processes.interrupt import interruptible
from vla_tools.serve import fleet_ingress
from vla_tools.serve.fleet_config import INGRESS, INGRESS_APP, POLICIES
from vla_tools.serve.fleet_policies import DRAIN_S, HEALTH, policies

_MOST_CONNECTIONS = 4096
_POLL_S = 0.2
# Results are small; by default Ray takes a third of the memory.
_STORE_BYTES = 100 << 20
_TOKEN_NAMES = ('RAY_AUTH_MODE', 'RAY_AUTH_TOKEN', 'RAY_AUTH_TOKEN_PATH')


def ingress(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application that robots connect to.

    Args:
        arguments: `key_file`, `send_timeout` and `keep_s` (seconds for which an older bundle
            without sessions stays) as the options of `vla_runtime serve`.
    """
    return (
        serve.deployment(serve.ingress(_application)(_Ingress))
        .options(
            **HEALTH,
            num_replicas=1,
            max_ongoing_requests=_MOST_CONNECTIONS,
            graceful_shutdown_timeout_s=DRAIN_S,
            ray_actor_options={'num_cpus': 0},
        )
        .bind(dict(arguments))
    )


class _Ingress:
    """The ingress as Ray makes it: this first, then the application."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        fleet_ingress.front = fleet_ingress.FleetIngress(arguments)

    async def drain(self) -> None:
        """Close each connection with the reason, after its answer."""
        assert fleet_ingress.front is not None
        await fleet_ingress.front.drain(DRAIN_S)


def _application() -> ASGIApp:
    assert fleet_ingress.front is not None
    return fleet_ingress.front.app


@contextmanager
def deployed(written: Mapping[str, Any]) -> Iterator[None]:
    """Deploy a `fleet_config` on the cluster of RAY_ADDRESS, or on one started here.

    Robots are served in the block. Its end answers what is running, closes each connection, and
    ends Ray Serve there.

    Raises:
        RuntimeError, ConnectionError: no cluster, a fleet that runs there already, or a policy that
            cannot be loaded.
    """
    address = os.environ.get('RAY_ADDRESS')
    options: dict[str, Any] = {}
    if address is None:
        options = {'include_dashboard': False, 'object_store_memory': _STORE_BYTES}
        if not any(name in os.environ for name in _TOKEN_NAMES):
            # Ray would write one to the home folder.
            os.environ['RAY_AUTH_TOKEN'] = secrets.token_hex(32)
    try:
        ray.init(address or 'local', log_to_driver=False, logging_level='ERROR', **options)
    except Exception as error:
        # Ray raises bare exceptions here.
        raise RuntimeError(f'Ray cannot be started: {one_line(str(error), 300)}') from error
    logging.getLogger('ray.serve').setLevel(logging.ERROR)
    try:
        # Its options hold from the first use of Serve on a cluster.
        serve.start(http_options=written['http_options'])
        if INGRESS_APP in serve.status().applications:
            raise RuntimeError(
                'a fleet runs on this cluster already: give it another bundle (POST /bundles), or '
                'end it (serve shutdown)'
            )
        try:
            builders = {POLICIES: policies, INGRESS: ingress}
            for one in written['applications']:
                target = builders[one['import_path']](one['args'])
                serve.run(target, name=one['name'], route_prefix=one['route_prefix'])
            yield
            serve.get_app_handle(INGRESS_APP).drain.remote().result(timeout_s=2 * DRAIN_S)
        finally:
            serve.shutdown()
    finally:
        ray.shutdown()


def wait_for_signal() -> None:
    """Return at Ctrl-C, SIGTERM or SIGHUP."""
    with interruptible() as interrupt:
        while not interrupt.wanted:
            time.sleep(_POLL_S)
