"""The option `--ray` of verbs that run many pieces of work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vla_runtime.processes.ray_cluster import LOCAL, ClusterUse, cluster_workers, require_ray
from vla_runtime.processes.workers import Pool


def add_ray_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare `--ray`; `what` runs there, such as `recordings`."""
    parser.add_argument(
        '--ray',
        metavar='ADDRESS',
        help=f'run the {what} on a Ray cluster: HOST:PORT or auto on a machine of it, '
        'ray://HOST:PORT from elsewhere, local to start one here for the time',
    )


def ray_pool(
    address: str,
    option: str,
    processes: int | None,
    inputs: Sequence[Path],
    packages: Sequence[str],
    cpus: int = 1,
    gpus: int = 0,
) -> Pool:
    """Return the cluster at an address as a pool.

    `option`: the verb's option that limits processes; `inputs` and `packages`: what every machine
    must have; `cpus` and `gpus`: of one piece of work. Raises ValueError: a limit of processes on
    a cluster that was there before; ClusterError: Ray is missing.
    """
    if processes is not None and address != LOCAL:
        raise ValueError(
            f'{option} with --ray {address}: the cluster places the work itself; leave one out'
        )
    require_ray()
    local_cpus = None if processes is None else processes * cpus
    use = ClusterUse(address, inputs, packages, cpus, gpus, local_cpus)
    return partial(cluster_workers, use)
