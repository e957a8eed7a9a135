"""The policy that a replay runs: the recorded one, or with changes another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.success import spec_identity
from vla_runtime.engines.triton_option import OFF
from vla_runtime.files.machine import machine, versions
from vla_runtime.nodes.policy.description import PolicyDescription
from vla_runtime.nodes.policy.robot_policy import RobotPolicy
from vla_runtime.policy import Policy
from vla_runtime.robot.match import RobotMatch, match_robot
from vla_tools.replay.recorded import ReplayError

# Facts of the machine that a chunk may depend on.
_MACHINE = ('cpu', 'cpu_instructions')


@dataclass(frozen=True)
class Changes:
    """Requested differences from the recording, settings by node name; None: as recorded."""

    bundle: Path | None = None
    backend: str | None = None
    device: str | None = None
    precision: str | None = None
    threads: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy ready to replay, in the robot's names and units.

    `cameras`: to the recorded policy's; `state` converts a recorded one; `differences` from the
    recording in words, none: the replay must be bit-identical.
    """

    policy: RobotPolicy
    cameras: Mapping[str, str]
    state: Callable[[np.ndarray], np.ndarray]
    differences: tuple[str, ...]


def load_policy(description: PolicyDescription, changes: Changes) -> LoadedPolicy:
    """Load the policy of a description, with changes.

    Raises ReplayError: no bundle, or it does not fit; BundleError: damaged or inconsistent;
    ValueError: backend, device or precision not available.
    """
    folder = changes.bundle or recorded_bundle(description)
    backend = changes.backend or description.backend
    device = changes.device or (description.device if not changes.backend else 'cpu')
    precision = changes.precision or description.precision
    bundle = read_bundle(folder, verify=False)
    spec = bundle.spec
    match, cameras, state = fit_recording(description, bundle)
    policy = Policy.load(
        bundle,
        backend,
        device,
        precision=precision,
        use_cuda_graphs=description.use_cuda_graphs,
        threads=changes.threads or description.threads,
        # Another backend has no such kernels.
        triton=description.triton if backend == 'torch' else OFF,
    )
    differences = [
        *_changed('bundle', description.bundle_sha256[:12], spec_identity(spec)[:12]),
        *_changed('backend', description.backend, backend),
        *_changed('device', description.device, device),
        *_changed('precision', description.precision, precision),
        *_changed('triton', description.triton, policy.triton),
        *_changed("PyTorch's compiler", description.compiled or 'unused', 'unused'),
        *_changed('threads', description.threads, policy.threads),
        *(f'setting {name} = {value}' for name, value in changes.settings.items()),
        *_other_machine(description),
    ]
    return LoadedPolicy(RobotPolicy(policy, match), cameras, state, tuple(differences))


def fit_recording(
    description: PolicyDescription, bundle: Bundle
) -> tuple[RobotMatch, Mapping[str, str], Callable[[np.ndarray], np.ndarray]]:
    """Fit a bundle to a recording (`LoadedPolicy`: cameras and state); ReplayError: no fit."""
    folder = bundle.folder
    match = match_robot(description.robot, bundle.spec, folder)
    cameras = _cameras(description, match, folder)
    return match, cameras, _state(description, match, folder)


def recorded_bundle(description: PolicyDescription) -> Path:
    """Return the folder of the recorded policy's bundle (ReplayError: it is not here)."""
    if description.server:
        raise ReplayError(
            f"the recording's bundle '{description.bundle_name}' "
            f'({description.bundle_sha256[:12]}…) ran at {description.server}; name a folder of it '
            'here with --bundle'
        )
    if not description.bundle.is_dir():
        raise ReplayError(
            f"the recording's bundle '{description.bundle_name}' was at {description.bundle}, "
            'which is not here; name its folder with --bundle'
        )
    return description.bundle


def _cameras(description: PolicyDescription, match: RobotMatch, folder: Path) -> dict[str, str]:
    """Return the recording's name of each of the policy's cameras."""
    recorded = {
        camera.name: name
        for camera in description.robot.cameras
        for name in description.cameras
        if name in (camera.name, *camera.aliases)
    }
    missing = [
        name
        for name, camera in match.cameras.items()
        if camera.name not in recorded
        or (name in match.earlier and name not in description.cameras)
    ]
    if missing:
        raise ReplayError(
            f'{folder}: its camera {missing[0]} was not used by the policy that was recorded, so '
            'its frames are not in the recording'
        )
    return {
        # An earlier frame of a camera was recorded under its own name.
        name: name if name in match.earlier else recorded[camera.name]
        for name, camera in match.cameras.items()
    }


def _state(
    description: PolicyDescription, match: RobotMatch, folder: Path
) -> Callable[[np.ndarray], np.ndarray]:
    """Return the conversion of a recorded state, which is in the recorded policy's units."""
    missing = [joint for joint in match.state_joints if joint not in description.state_joints]
    if missing:
        raise ReplayError(
            f'{folder}: its state has joint {missing[0]}, which is not in the recorded state'
        )
    order = [description.state_joints.index(joint) for joint in match.state_joints]
    before, now = description.state, match.state
    if np.array_equal(before.scale[order], now.scale) and np.array_equal(
        before.offset[order], now.offset
    ):
        # Converted there and back, the last bits would differ.
        return lambda state: state[order]
    return lambda state: now.to_policy(before.to_robot(state)[order])


def _changed(what: str, before: object, now: object) -> list[str]:
    return [] if before == now else [f'{what} {now} (recorded: {before})']


def _other_machine(description: PolicyDescription) -> list[str]:
    here = versions([name for name in description.versions if name != 'python'])
    differences = []
    for name, version in description.versions.items():
        differences += _changed(name, version, here.get(name, 'not installed'))
    facts = machine()
    for name in _MACHINE:
        # Older recordings lack the instructions.
        if (recorded := description.machine.get(name)) is not None:
            differences += _changed(name, recorded, facts[name])
    return differences
