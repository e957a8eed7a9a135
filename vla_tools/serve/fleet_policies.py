"""The replicas of one bundle as an application of Ray Serve: how many, where, and their health."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from vla_runtime.engines.devices import default_device
from vla_runtime.engines.preflight import AUTO
from vla_tools.serve.fleet_replica import PolicyReplica
from vla_tools.serve.fleet_router import SessionRouter

# Time that running requests get at the end of a replica.
DRAIN_S = 30.0
# A replica whose process lives and does not answer is lost after a period and the timeout.
HEALTH = {'health_check_period_s': 5, 'health_check_timeout_s': 20}
# Open requests of a replica above which another is started, where their number is automatic.
_TARGET_REQUESTS = 4


def policies(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application of one bundle's replicas.

    Args:
        arguments: `bundle`, a folder that each machine has; `replicas`, a number or `auto` (from 1
            to the cluster's GPUs, or CPUs where there is none, by open requests); `serve`, fields
            of `ServeOptions`; `backend`, `device`, `precision`, `threads`, `keys`, `max_rate` as
            the options of `vla_runtime serve`.
    """
    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get('GPU', 0)), int(resources.get('CPU', 1))
    device = arguments.get('device')
    if device is None:
        device = 'cuda' if gpus else default_device(arguments.get('backend', AUTO))
    on_gpu = device.startswith('cuda')
    threads = arguments.get('threads') or 1
    replicas = arguments.get('replicas', AUTO)
    if replicas == AUTO:
        most = gpus if on_gpu else cpus // threads
        count: dict[str, Any] = {
            'autoscaling_config': {
                'min_replicas': 1,
                'max_replicas': max(1, most),
                'target_ongoing_requests': _TARGET_REQUESTS,
                # A replica that ends takes its sessions' caches along.
                'downscale_delay_s': 600,
            }
        }
    else:
        count = {'num_replicas': replicas}
    most_sessions = arguments.get('serve', {}).get('max_sessions', 64)
    return (
        serve.deployment(PolicyReplica)
        .options(
            **count,
            **HEALTH,
            max_ongoing_requests=most_sessions + 16,
            graceful_shutdown_timeout_s=DRAIN_S,
            ray_actor_options=_share(device, threads),
            request_router_config=RequestRouterConfig(request_router_class=SessionRouter),
        )
        .bind({**arguments, 'device': device, 'threads': threads})
    )


def _share(device: str, threads: int) -> dict[str, float]:
    """Return what a replica takes of a machine.

    Half of its threads: another bundle's replicas start beside those that are about to end.
    """
    return {'num_cpus': threads / 2, 'num_gpus': int(device.startswith('cuda'))}


def has_room(arguments: Mapping[str, Any]) -> bool:
    """Return whether the cluster has room for a bundle beside those that it serves.

    Args:
        arguments: of a replica that runs.
    """
    free, replicas = ray.available_resources(), arguments.get('replicas', AUTO)
    share = _share(arguments['device'], arguments['threads'])
    count = 1 if replicas == AUTO else replicas
    return all(
        free.get(kind, 0) >= count * share[name]
        for kind, name in (('CPU', 'num_cpus'), ('GPU', 'num_gpus'))
    )
