"""A policy from its bundle to a served one: loaded, warm, its batches tried."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.devices import default_device
from vla_runtime.engines.preflight import AUTO
from vla_runtime.policy import Policy
from vla_tools.serve.request_keys import KeysFile
from vla_tools.serve.served_policy import ServedPolicy, ServeOptions
from vla_tools.serve.statistics import Metrics


@dataclass(frozen=True)
class Loading:
    """How the policies of a server are loaded.

    Attributes:
        device: None: that of the backend.
        threads: of each network; None: what the environment says.
        keys: a client's keys; None: the usual ones.
    """

    options: ServeOptions
    backend: str = AUTO
    device: str | None = None
    precision: str = AUTO
    threads: int | None = None
    keys: KeysFile | None = None


def load_served(
    name: str, folder: Path, loading: Loading, metrics: Metrics, policies: tuple[str, ...] = ()
) -> tuple[ServedPolicy, str]:
    """Load and warm a policy; return it, and a line about it for whoever started the server.

    Raises:
        ValueError, RuntimeError, OSError: the bundle cannot be served so; nothing stays loaded.
    """
    bundle = read_bundle(folder)
    device = loading.device or default_device(loading.backend)
    policy = Policy.load(
        bundle,
        loading.backend,
        device,
        precision=loading.precision,
        threads=loading.threads,
        verify=False,
    )
    try:
        milliseconds = policy.warm_up()
        served = ServedPolicy(
            name,
            policy,
            bundle,
            device,
            loading.options,
            metrics,
            keys=loading.keys,
            policies=policies,
        )
    except BaseException:
        policy.close()
        raise
    return served, (
        f'{name}: {policy.spec.name}, {policy.backend} on {device} in {policy.precision}, '
        f'warm in {milliseconds:.0f} ms; batches of up to {served.metadata["max_batch"]}: '
        f'{served.why_batches}; a session takes {served.session_bytes / 1e6:.1f} MB'
    )
