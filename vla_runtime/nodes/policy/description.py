"""Description of a running policy: all of an inference's inputs that stay the same, as JSON.

It goes out once, latched, on `~/description`; `~/report` has what changes from chunk to chunk. No
ROS 2 here: a replay reads it where none is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime import __version__
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.success import spec_identity
from vla_runtime.engines.triton_option import OFF, ON
from vla_runtime.files.machine import CHUNK_PACKAGES, steady_facts, versions
from vla_runtime.files.quotes import quoted
from vla_runtime.robot.file import read_robot
from vla_runtime.robot.match import RobotMatch, Scaling
from vla_runtime.robot.schema import Robot

FORMAT = 2
# Keys of a report: of a camera's frame with `stamp: receive`, by content, and of the state in the
# robot's units.
CONTENT, MEASURED = 'content.', 'measured'


@dataclass(frozen=True)
class Run:
    """What a policy's networks run on.

    Attributes:
        bundle: absolute folder; empty on a server.
        server: address of the server that runs them; empty here.
        jpeg_quality: of the images on their way to the server; 0: raw.
        threads: CPU threads of each network.
        versions, machine: of the server; empty: of this machine.
    """

    bundle: str
    backend: str
    device: str
    precision: str
    use_cuda_graphs: bool
    triton: str
    threads: int
    server: str = ''
    jpeg_quality: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


class DescriptionError(ValueError):
    """A description that cannot be read; the message names the field."""


@dataclass(frozen=True)
class PolicyDescription:
    """A policy as it ran.

    Attributes:
        bundle: folder of the bundle on the machine that it ran on; on a server not known.
        server: address of the server that ran it; empty where the node did.
        jpeg_quality: of the images on their way to the server; 0: raw.
        bundle_sha256: see `bundle.success.spec_identity`.
        precision: number format of the networks' large matrices.
        threads: CPU threads of each network.
        triton: `on` where the head's layers ran in Triton kernels, else `off`.
        compiled: networks that ran as PyTorch's compiler made them, as earlier releases could.
        cameras: policy's camera name to full topic name; other topics have full names too.
        state_joints: the robot's joint of each number of the policy's state, in order.
        measured_joints: joints that the state is made of, as reports have their positions.
        state_scale, state_offset: of each state, from the policy's unit to the robot's.
        reads_instruction: False for a policy without language; True in a recording of an earlier
            release.
        step_time_s: None in a recording of an earlier release.
    """

    bundle: Path
    bundle_name: str
    bundle_sha256: str
    robot: Robot
    backend: str
    device: str
    precision: str
    threads: int
    use_cuda_graphs: bool
    triton: str
    compiled: str
    cameras: Mapping[str, str]
    joint_states: tuple[str, ...]
    state_joints: tuple[str, ...]
    measured_joints: tuple[str, ...]
    state_scale: tuple[float, ...]
    state_offset: tuple[float, ...]
    committed_plan: str
    action_chunk: str
    reads_instruction: bool
    step_time_s: float | None
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    server: str = ''
    jpeg_quality: int = 0

    @property
    def state(self) -> Scaling:
        """Conversion between measured positions and the policy's state."""
        return Scaling(np.array(self.state_scale), np.array(self.state_offset))


def describe(
    spec: BundleSpec,
    robot: Robot,
    match: RobotMatch,
    run: Run,
    *,
    topic_name: Callable[[str], str],
) -> str:
    """Write the description of a policy that was loaded."""
    document = {
        'format': FORMAT,
        'vla_runtime': __version__,
        'bundle': run.bundle,
        'bundle_name': spec.name,
        'bundle_sha256': spec_identity(spec),
        'robot_file': robot.file.name,
        'robot_text': robot.text,
        'urdf_text': robot.urdf_text,
        'server': run.server,
        'jpeg_quality': run.jpeg_quality,
        'backend': run.backend,
        'device': run.device,
        'precision': run.precision,
        'use_cuda_graphs': run.use_cuda_graphs,
        'triton': run.triton,
        'threads': run.threads,
        'cameras': {name: topic_name(camera.topic) for name, camera in match.cameras.items()},
        'joint_states': [topic_name(source.topic) for source in robot.joint_states],
        'state_joints': list(match.state_joints),
        'measured_joints': list(match.measured_joints),
        'state_scale': match.state.scale.tolist(),
        'state_offset': match.state.offset.tolist(),
        'committed_plan': topic_name('committed_plan'),
        'action_chunk': topic_name('action_chunk'),
        'reads_instruction': spec.prompt is not None,
        'step_time_s': spec.step_time_s,
        'versions': dict(run.versions or versions(CHUNK_PACKAGES)),
        'machine': dict(run.machine or steady_facts()),
    }
    return json.dumps(document)


def read_description(text: str) -> PolicyDescription:
    """Read what `describe` wrote.

    Raises:
        DescriptionError: it is damaged, or of another format; names the field.
        RobotError: its robot file cannot be used.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise DescriptionError('the description is no JSON') from None
    if not isinstance(document, dict) or document.get('format') != FORMAT:
        said = document if isinstance(document, dict) else {}
        raise DescriptionError(
            f'field format of the description is {quoted(said.get("format"))}, expected {FORMAT}: '
            f'it was recorded with vla_runtime {quoted(said.get("vla_runtime"))}, this is '
            f'{__version__}'
        )
    fields = _Fields(document)
    urdf_text = document.get('urdf_text')
    state_joints: Sequence[str] = fields.of('state_joints', list)
    triton, compiled = _forms(document, fields)
    robot = read_robot(
        fields.text('robot_text'),
        Path(fields.text('robot_file')),
        lambda _: urdf_text if isinstance(urdf_text, str) else '',
    )
    return PolicyDescription(
        bundle=Path(fields.text('bundle')),
        bundle_name=fields.text('bundle_name'),
        bundle_sha256=fields.text('bundle_sha256'),
        robot=robot,
        backend=fields.text('backend'),
        device=fields.text('device'),
        precision=fields.text('precision'),
        threads=fields.of('threads', int),
        use_cuda_graphs=fields.of('use_cuda_graphs', bool),
        triton=triton,
        compiled=compiled,
        cameras=fields.texts('cameras'),
        joint_states=tuple(fields.of('joint_states', list)),
        state_joints=tuple(state_joints),
        # Each number of the state was a joint before there was the field.
        measured_joints=tuple(
            fields.of('measured_joints', list) if 'measured_joints' in document else state_joints
        ),
        state_scale=fields.numbers('state_scale', len(state_joints)),
        state_offset=fields.numbers('state_offset', len(state_joints)),
        committed_plan=fields.text('committed_plan'),
        action_chunk=fields.text('action_chunk'),
        reads_instruction=(
            fields.of('reads_instruction', bool) if 'reads_instruction' in document else True
        ),
        step_time_s=fields.of('step_time_s', float) if 'step_time_s' in document else None,
        versions=fields.texts('versions'),
        machine=fields.of('machine', dict),
        # There were no servers before there were these fields.
        server=str(document.get('server', '')),
        jpeg_quality=int(document.get('jpeg_quality', 0)),
    )


def _forms(document: Mapping[str, Any], fields: _Fields) -> tuple[str, str]:
    """`triton` and `compiled`, which earlier releases wrote otherwise or not at all."""
    if 'triton' in document:
        return fields.text('triton'), ''
    # Nothing was compiled before there was this field.
    word = fields.text('torch_compile') if 'torch_compile' in document else 'none'
    parts = {'none': [], 'all': ['vision', 'prefix', 'denoise']}.get(word, word.split('+'))
    compiled = '+'.join(part for part in parts if part != 'triton')
    return ON if 'triton' in parts else OFF, compiled


def is_description(topic: str) -> bool:
    return topic.endswith('/description')


def find_description(
    texts: Iterable[tuple[int, str, str]], namespace: str | None, note: Callable[[str], None]
) -> PolicyDescription | None:
    """Return the first description of the policy node of a bag; None where it has none.

    Args:
        texts: time, topic and text of possible descriptions.
        namespace: of the node; None: there is one node.
        note: called for each that cannot be read; other nodes have topics of that name too.

    Raises:
        DescriptionError: several policy nodes are described, or none in that namespace; names them.
    """
    found: dict[str, PolicyDescription] = {}
    for _, topic, text in texts:
        try:
            found.setdefault(topic, read_description(text))
        except ValueError as error:
            note(f'topic {topic}: {error}')
    nodes = ', '.join(sorted(topic.rpartition('/')[0] for topic in found))
    if namespace is not None:
        wanted = f'/{namespace.strip("/")}'.rstrip('/')
        # NAMESPACE/NODE/description
        inside = [topic for topic in found if topic.rsplit('/', 2)[0] == wanted]
        if found and not inside:
            raise DescriptionError(
                f'--namespace {namespace}: the policy node that is described is {nodes}'
            )
        found = {topic: found[topic] for topic in inside}
    if len(found) > 1:
        raise DescriptionError(
            f'several policy nodes are in it: {nodes}; choose one with --namespace'
        )
    return next(iter(found.values()), None)


class _Fields:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def of(self, name: str, kind: type) -> Any:
        value = self._document.get(name)
        if not isinstance(value, kind):
            raise DescriptionError(
                f'field {name} of the description is no {kind.__name__}: {value!r:.60}'
            )
        return value

    def text(self, name: str) -> str:
        return str(self.of(name, str))

    def texts(self, name: str) -> dict[str, str]:
        values = self.of(name, dict)
        if not all(isinstance(value, str) for value in values.values()):
            raise DescriptionError(f'field {name} of the description holds more than texts')
        return dict(values)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        values = self.of(name, list)
        if len(values) != count or not all(isinstance(value, int | float) for value in values):
            raise DescriptionError(f'field {name} of the description: expected {count} numbers')
        return tuple(map(float, values))
