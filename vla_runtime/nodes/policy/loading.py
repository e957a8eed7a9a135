"""From the node's parameters to a policy that is loaded here, or asked on a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.inference.chunk_policy import ChunkPolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.nodes.policy.description import Run
from vla_runtime.nodes.policy.parameters import POLICY_PARAMETERS, REMOTE
from vla_runtime.nodes.policy.settings import check_answerable
from vla_runtime.nodes.server_parameters import server_address
from vla_runtime.policy import Policy
from vla_runtime.remote.policy import RemotePolicy
from vla_runtime.robot.match import RobotMatch, match_robot
from vla_runtime.robot.schema import Robot

# Parameters about the machine that the networks run on.
_OF_THIS_MACHINE = (
    *('device', 'precision', 'use_cuda_graphs', 'triton', 'verify_bundle', 'torch_threads'),
)


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy that fits the robot; `run` names what it runs on, for a recording."""

    policy: ChunkPolicy
    match: RobotMatch
    run: Run
    why: str = ''


def load_policy(
    given: Mapping[str, Any], robot: Robot, settings: PolicySettings, note: Callable[[str], None]
) -> LoadedPolicy:
    """Load the policy, or connect to its server, once the robot file was matched with it.

    Args:
        given: the node's parameters.
        note: called when a server is lost, refused or back; by any thread.

    Raises:
        BundleError, MatchError, ServerLostError, ValueError: names what does not fit; nothing stays
            loaded then.
    """
    if given['backend'] == REMOTE:
        return _on_server(given, robot, settings, note)
    if given['server']:
        raise ValueError(
            f"parameter server is given, and backend is '{given['backend']}': a policy on a server "
            "is run with backend 'remote'"
        )
    if given['jpeg_quality']:
        raise ValueError("parameter jpeg_quality is for backend 'remote'; leave it at 0")
    if not given['bundle']:
        raise ValueError("parameter 'bundle' is not set; give it as -p bundle:=PATH")
    # Files that do not fit are refused before gigabytes of weights are hashed and loaded.
    bundle = read_bundle(Path(given['bundle']).expanduser(), verify=False)
    check_answerable(bundle.spec, settings)
    match = match_robot(robot, bundle.spec, bundle.folder)
    policy = Policy.load(
        bundle,
        given['backend'],
        given['device'],
        precision=given['precision'],
        settings=settings,
        use_cuda_graphs=given['use_cuda_graphs'],
        threads=given['torch_threads'],
        triton=given['triton'],
        verify=given['verify_bundle'],
    )
    run = Run(
        bundle=str(bundle.folder.resolve()),
        backend=policy.backend,
        device=given['device'],
        precision=policy.precision,
        use_cuda_graphs=given['use_cuda_graphs'],
        triton=policy.triton,
        threads=policy.threads or 0,
    )
    return LoadedPolicy(policy, match, run, policy.why)


def _on_server(
    given: Mapping[str, Any], robot: Robot, settings: PolicySettings, note: Callable[[str], None]
) -> LoadedPolicy:
    if not given['server']:
        raise ValueError(
            "parameter 'server' is not set, and backend is 'remote'; give it as "
            '-p server:=ws://HOST:PORT'
        )
    defaults = {row.name: row.default for row in POLICY_PARAMETERS}
    if told := [name for name in _OF_THIS_MACHINE if given[name] != defaults[name]]:
        raise ValueError(
            f"parameter {told[0]} is {given[told[0]]!r}, and backend is 'remote': the server says "
            'how its networks run; leave it out'
        )
    policy = RemotePolicy(
        server_address(given), settings, jpeg_quality=given['jpeg_quality'], note=note
    )
    try:
        check_answerable(policy.spec, settings)
        match = match_robot(robot, policy.spec, policy.url)
    except ValueError:
        policy.close()
        raise
    contract = policy.contract
    run = Run(
        bundle='',
        server=policy.url,
        jpeg_quality=given['jpeg_quality'],
        backend=contract.backend,
        device=contract.device,
        precision=contract.precision,
        use_cuda_graphs=contract.use_cuda_graphs,
        triton=contract.triton,
        threads=contract.threads,
        versions=contract.versions,
        machine=contract.machine,
    )
    return LoadedPolicy(policy, match, run)
