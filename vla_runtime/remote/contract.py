"""The contract of a served policy: what it reads, what it returns, and how it runs.

A server sends it first. Any client of openpi's wire finds cameras, names, units and sizes in it.
A robot's node reads the bundle's whole `policy.yaml` and its statistics from it, so that a policy
on another machine is matched with the robot file like one on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_runtime import __version__
from vla_runtime.bundle.rules import dump_spec, parse_spec
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.statistics import check_statistics
from vla_runtime.bundle.success import spec_identity
from vla_runtime.engines.protocol import FEATURES, Feature
from vla_runtime.family.declaration import image_sizes
from vla_runtime.family.listing import find_family
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.machine import CHUNK_PACKAGES, steady_facts, versions
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import LARGEST_FILE
from vla_runtime.inference.request_builder import noise_shape
from vla_runtime.policy import Policy

# Grows by one where a client of before would misread an answer.
PROTOCOL = 1
_SERVER = 'vla_runtime'


class ContractError(ValueError):
    """A contract that no robot can be driven by; the message names the field."""


@dataclass(frozen=True)
class Contract:
    """A served policy, as a robot's node knows it.

    Attributes:
        statistics: as of `Bundle.statistics`.
        bundle_sha256: see `spec_identity`.
        backend, device, precision, triton: what the networks run on, at the server.
        threads: CPU threads of each network there.
        use_cuda_graphs: captured graphs are replayed there.
        max_rows: most prompt rows of an inference: 2 with guidance.
        features: of the engine.
        version: of the server's vla_runtime.
        versions, machine: packages and processor that a chunk may depend on.
    """

    spec: BundleSpec
    statistics: Mapping[str, np.ndarray]
    bundle_sha256: str
    backend: str
    device: str
    precision: str
    triton: str
    threads: int
    use_cuda_graphs: bool
    max_rows: int
    features: frozenset[Feature]
    version: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]


def contract_of(
    policy: Policy, statistics: Mapping[str, np.ndarray], device: str, policies: Sequence[str]
) -> dict[str, Any]:
    """Return the contract of a loaded policy, of plain types and arrays; `read_contract` reads it.

    `image_resolution`, `action_horizon` and `needs_session_id` have the names that other servers
    of this wire use. Sizes of images are (height, width). Actions are named as they arrive at the
    robot: a policy's deltas are absolute targets by then.
    """
    spec, family = policy.spec, find_family(policy.spec.family)
    sizes = image_sizes(spec.dims)
    fixed = spec.fixed_image_sizes is not None
    return {
        'server': _SERVER,
        'version': __version__,
        'protocol': PROTOCOL,
        'policy': spec.name,
        'family': spec.family,
        'bundle_sha256': spec_identity(spec),
        'policies': list(policies),
        'backend': policy.backend,
        'device': device,
        'precision': policy.precision,
        'cameras': [
            {'name': camera.name, 'height': size[0], 'width': size[1], 'any_size': not fixed}
            for camera, size in zip(spec.cameras, sizes, strict=True)
            if camera.present
        ],
        'image_encodings': ['raw', 'jpeg', 'png'],
        'image_resolution': list(sizes[0]),
        'state': [{'name': item.name, 'unit': item.unit} for item in spec.state],
        'actions': [
            {'name': action.name, 'unit': action.unit, 'kind': kind}
            for action, kind in zip(spec.actions, command_kinds(spec), strict=True)
        ],
        'action_horizon': spec.real_horizon,
        'step_time_s': spec.step_time_s,
        'rate_hz': 1.0 / spec.step_time_s,
        'reads_instruction': spec.prompt is not None,
        'instruction_template': spec.prompt.template if spec.prompt else '',
        'takes_noise': family.takes_steps,
        'noise_shape': list(noise_shape(spec, policy.settings)),
        'takes_plan': family.takes_steps,
        'needs_session_id': False,
        'bundle': {
            'policy_yaml': dump_spec(spec),
            'statistics': {name: np.asarray(value) for name, value in statistics.items()},
        },
        'runs': {
            'triton': policy.triton,
            'threads': policy.threads or 0,
            'use_cuda_graphs': True,
            'max_rows': policy.max_rows,
            'features': sorted(policy.features),
            'versions': versions(CHUNK_PACKAGES),
            'machine': steady_facts(),
        },
    }


def command_kinds(spec: BundleSpec) -> tuple[str, ...]:
    """Return the kind of each action as it arrives at the robot: `position` or `velocity`."""
    return tuple('velocity' if action.kind == 'velocity' else 'position' for action in spec.actions)


def read_contract(told: Any) -> Contract:
    """Read what `contract_of` made, from a server that may be anything.

    Raises:
        ContractError: another kind of server or protocol, or a field that is missing or wrong.
    """
    if not isinstance(told, dict) or told.get('server') != _SERVER or 'bundle' not in told:
        raise ContractError(
            "the server's first message is no contract of vla_runtime; a robot's node needs "
            '`vla_runtime serve` on the other side'
        )
    fields = _Fields(told, '')
    version = fields.of('version', str)
    protocol = fields.of('protocol', int)
    if protocol != PROTOCOL:
        raise ContractError(
            f'protocol: the server (vla_runtime {version[:20]}) speaks {protocol}, and this '
            f'vla_runtime {__version__} speaks {PROTOCOL}; install one release on both machines'
        )
    bundle, runs = fields.part('bundle'), fields.part('runs')
    spec = _spec(bundle.of('policy_yaml', str))
    identity = fields.of('bundle_sha256', str)
    if spec_identity(spec) != identity:
        raise ContractError(
            f'bundle_sha256: the server (vla_runtime {version[:20]}) says {identity[:12]}…, and '
            f'its policy.yaml comes to {spec_identity(spec)[:12]}… with vla_runtime {__version__} '
            'here; install one release on both machines'
        )
    statistics = bundle.of('statistics', dict)
    try:
        if not all(isinstance(value, np.ndarray) for value in statistics.values()):
            raise FieldError('', 'a statistic is no array')
        check_statistics(spec, statistics)
    except FieldError as error:
        raise ContractError(f'bundle.statistics: {error}') from None
    known = frozenset(feature for features in FEATURES.values() for feature in features)
    return Contract(
        spec=spec,
        statistics=statistics,
        bundle_sha256=identity,
        backend=fields.of('backend', str),
        device=fields.of('device', str),
        precision=fields.of('precision', str),
        triton=runs.of('triton', str),
        threads=runs.of('threads', int),
        use_cuda_graphs=runs.of('use_cuda_graphs', bool),
        max_rows=runs.of('max_rows', int),
        features=known.intersection(runs.texts('features')),
        version=version,
        versions=runs.plain('versions'),
        machine=runs.plain('machine'),
    )


def _spec(text: str) -> BundleSpec:
    if len(text) > LARGEST_FILE:
        raise ContractError(f'bundle.policy_yaml: more than {LARGEST_FILE} characters')
    try:
        return parse_spec(text)
    except FieldError as error:
        raise ContractError(f'bundle.policy_yaml: {error}') from None


class _Fields:
    """Fields of a map that came over the wire, by their types."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values, self._path = values, path

    def of(self, name: str, kind: type) -> Any:
        value = self._values.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ContractError(f'{self._path}{name}: {quoted(value)} is no {kind.__name__}')
        return value

    def part(self, name: str) -> _Fields:
        return _Fields(self.of(name, dict), f'{name}.')

    def plain(self, name: str) -> dict[str, Any]:
        """Return a map of names to texts and numbers."""
        values = self.of(name, dict)
        if not all(isinstance(one, str | int | float | None) for one in values.values()):
            raise ContractError(f'{self._path}{name}: holds more than texts and numbers')
        return {str(key): value for key, value in values.items()}

    def texts(self, name: str) -> list[str]:
        values = self.of(name, list)
        if not all(isinstance(value, str) for value in values):
            raise ContractError(f'{self._path}{name}: holds more than texts')
        return list(values)
