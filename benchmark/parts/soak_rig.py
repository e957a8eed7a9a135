"""Everything that one session of the soak consists of: both nodes, cameras, robot and operator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from parts.graph_rig import LATCHED, RELIABLE, ROOT, Graph, isolate
from parts.random_policy import random_network
from parts.soak_checks import STAYS, Fault, Frames, Record, cut_offs
from parts.soak_robot import SimulatedRobot
from rcl_interfaces.srv import SetParameters
from rclpy.parameter import Parameter
from rclpy.serialization import serialize_message
from std_msgs.msg import String
from std_srvs.srv import Trigger

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import chunk_type
from vla_runtime.nodes.middleware import PROFILE_VARIABLES
from vla_runtime.nodes.node_main import MODULES
from vla_runtime.nodes.service_call import TRANSITIONS
from vla_runtime.processes.parent_death import dies_with_this_process

sys.path.insert(0, str(Path(__file__).parents[2] / 'test'))
from written_bundle import write_bundle  # isort: skip

from vla_runtime.bundle.schema import (
    ActionSpec,
    BundleSpec,
    CameraSpec,
    ImageSpec,
    NormalisationSpec,
    StateSpec,
)
from vla_runtime.declarations.pi import PiDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.policy import Policy
from vla_runtime.processing.prompts import PromptFormat
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.schema import Robot
from vla_runtime.types import Observation

_PROFILES = {'nodes': 'fastdds.xml', 'executor': 'fastdds_executor.xml'}
_UDP = '<type>UDPv4</type>'
_LOOPBACK = '<interfaceWhiteList><address>127.0.0.1</address></interfaceWhiteList>'
# A call may go to a dead node alone, which discovery believes in for some 20 s.
_CALL_S = 3.0
_INSIST_S = 90.0
_END_S = 60.0


@dataclass(frozen=True)
class Profiles:
    """Fast DDS profiles as shipped, but for the loopback interface alone."""

    nodes: Path
    executor: Path


@contextmanager
def robot_graph(folder: Path) -> Iterator[tuple[Graph, Profiles]]:
    """A graph as a robot's network is, limited to this machine; profiles go into `folder`.

    `LOCALHOST` would give every process shared memory. This process, which is the robot, keeps out
    of it as the executor does.
    """
    isolate()
    os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'SUBNET'
    made = {}
    for user, name in _PROFILES.items():
        text = (ROOT / 'config' / name).read_text(encoding='utf-8')
        assert _UDP in text
        made[user] = folder / name
        made[user].write_text(text.replace(_UDP, _UDP + _LOOPBACK), encoding='utf-8')
    os.environ.update(use_profile(made['executor']))
    graph = Graph('benchmark')
    try:
        yield graph, Profiles(**made)
    finally:
        graph.close()


def use_profile(profile: Path) -> dict[str, str]:
    """Environment with which Fast DDS takes a profile."""
    return dict.fromkeys(PROFILE_VARIABLES, str(profile))


class Child:
    """A Python process in its own process group, with its output in a file.

    `words`: of the command line; `ends_with_stdin`: instead of SIGINT; `profile`: of Fast DDS.
    """

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        *,
        profile: Path,
        ends_with_stdin: bool = False,
    ) -> None:
        self.log = log
        self._ends_with_stdin = ends_with_stdin
        self._frozen = False
        with log.open('a') as out:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                preexec_fn=dies_with_this_process(),
                env={**os.environ, **use_profile(profile)},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def say(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + '\n')
        self._process.stdin.flush()

    def freeze(self) -> None:
        self._frozen = True
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        self._frozen = False
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> int:
        """End it as a user would; return its exit code, below 0 where it had to be killed."""
        if self._frozen:
            self.thaw()
        if self.running:
            if self._ends_with_stdin:
                assert self._process.stdin is not None
                self._process.stdin.close()
            else:
                os.killpg(self.pid, signal.SIGINT)
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode

    def memory_mib(self) -> float:
        text = Path(f'/proc/{self.pid}/status').read_text(encoding='ascii')
        return int(text.split('VmRSS:')[1].split()[0]) / 1024


class Services:
    """Calls services of nodes that may be frozen, dead or restarted."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def call(self, kind: Any, name: str, request: Any, timeout_s: float = _CALL_S) -> Any:
        """Return the answer, or None when none came in time."""
        node = self._graph.node
        client = node.create_client(kind, name)
        end_s = time.monotonic() + timeout_s
        future = None
        try:
            while time.monotonic() < end_s:
                if future is None and client.service_is_ready():
                    future = client.call_async(request)
                if future is not None and future.done():
                    return future.result()
                time.sleep(0.005)
        finally:
            node.destroy_client(client)
        return None

    def insist(self, kind: Any, name: str, request: Any) -> Any:
        """The answer of a call that may be repeated; TimeoutError: none came."""
        end_s = time.monotonic() + _INSIST_S
        while time.monotonic() < end_s:
            answer = self.call(kind, name, request)
            if answer is not None:
                return answer
        raise TimeoutError(f'{name} has not answered for {_INSIST_S:g} s')

    def bring_up(self, node: str) -> None:
        """Configure and activate a new lifecycle node; RuntimeError: it refused."""
        for transition in ('configure', 'activate'):
            number, _, goal = TRANSITIONS[transition]
            request = ChangeState.Request(transition=Transition(id=number))
            end_s = time.monotonic() + _INSIST_S
            while self._state(node) != goal:
                answer = self.call(ChangeState, f'{node}/change_state', request, 30.0)
                if answer is not None and not answer.success and self._state(node) != goal:
                    raise RuntimeError(f'{node} did not {transition}; its log says why')
                if time.monotonic() > end_s:
                    raise TimeoutError(f'{node} did not {transition} for {_INSIST_S:g} s')

    def _state(self, node: str) -> str:
        answer = self.insist(GetState, f'{node}/get_state', GetState.Request())
        return str(answer.current_state.label)

    def set(self, node: str, **parameters: Any) -> str:
        """Set live parameters together; why they were refused, empty when they were not."""
        request = SetParameters.Request()
        request.parameters = [
            Parameter(name, value=value).to_parameter_msg() for name, value in parameters.items()
        ]
        answer = self.insist(SetParameters, f'{node}/set_parameters', request)
        return '; '.join(result.reason for result in answer.results if not result.successful)


_ROOT = Path(__file__).resolve().parents[2]
_ALOHA = _ROOT / 'config' / 'robots' / 'aloha.yaml'
_TOKENIZER = _ROOT / 'test' / 'cases' / 'lerobot_pi05_tiny' / 'tokenizer.json'
INSTRUCTION = 'put the cup on the shelf'
_HEADS = {'depth': 4, 'num_heads': 4, 'num_kv_heads': 1, 'head_dim': 32}
_DIMS = PiDims(
    vision=VisionDims(width=128, depth=4, num_heads=4, mlp_dim=512, patch_size=14, image_size=112),
    language=DecoderDims(width=192, mlp_dim=768, **_HEADS),
    expert=DecoderDims(width=96, mlp_dim=384, **_HEADS),
    vocabulary=400,
    cameras=4,
    prompt_length=160,
    horizon=50,
    action_dim=32,
)
_DENOISE_STEPS = 4
AT_ITS_LIMIT = 'left_elbow'
# The noise that a chunk is denoised from stays in its rows: this much of a joint's range.
ROW_NOISE = 0.001
# Ratio of a chunk's motion to its noise.
_GAIN = 100.0
_LOOKS = 8


def write_robot(target: Path) -> Robot:
    """Write ALOHA's robot file with outputs whose messages are stamped, and read it."""
    content = yaml.safe_load(_ALOHA.read_text(encoding='utf-8'))
    names = [joint['name'] for joint in content['joints']]
    for joint in content['joints']:
        # Commands are compared with the limits in the same units.
        joint.pop('command', None)
    content['name'] = 'soak'
    content['outputs'] = [
        {
            'kind': 'joint_state',
            'topic': f'follower_{side}/commands',
            'joints': [name for name in names if name.startswith(side)],
        }
        for side in ('left', 'right')
    ]
    target.write_text(yaml.safe_dump(content, sort_keys=False), encoding='utf-8')
    return load_robot(target)


def home(robot: Robot) -> np.ndarray:
    """(joints,) middle of each range, and the upper limit for `AT_ITS_LIMIT`."""
    return np.array(
        [
            joint.upper if joint.name == AT_ITS_LIMIT else (joint.lower + joint.upper) / 2
            for joint in robot.joints
        ]
    )


def _half_range(robot: Robot) -> np.ndarray:
    return np.array([(joint.upper - joint.lower) / 2 for joint in robot.joints])


def _spec(robot: Robot, step_time_s: float) -> BundleSpec:
    return BundleSpec(
        name='soak',
        family='pi05',
        dims=_DIMS,
        cameras=tuple(CameraSpec(camera.name) for camera in robot.cameras),
        images=ImageSpec(padding='centre', resample='bilinear'),
        state=tuple(StateSpec(joint.name, joint.unit) for joint in robot.joints),
        actions=tuple(ActionSpec(joint.name, joint.unit, 'absolute') for joint in robot.joints),
        step_time_s=step_time_s,
        denoise_steps=_DENOISE_STEPS,
        prompt=PromptFormat(template='pi05_state', cleaning='openpi', advantage='before_action'),
        normalisation=NormalisationSpec(state='quantiles_openpi', actions='quantiles_openpi'),
        tokenizer='tokenizer.json',
    )


def _weights(seed: int) -> dict[str, np.ndarray]:
    """Random weights of an expert that does not see its noise, so that its rows are smooth."""
    network = random_network('pi05', _DIMS, 'cpu', 'float32', seed)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    weights['action_in.weight'] = np.zeros_like(weights['action_in.weight'])
    weights['action_out.weight'] = _GAIN * weights['action_out.weight']
    return weights


def write_policy(folder: Path, robot: Robot, step_time_s: float, seed: int) -> Path:
    """Write the bundle, whose mean action is `home`, to a new folder."""
    # Spinning threads are ten times slower on a busy machine.
    torch.set_num_threads(1)
    spec, weights = _spec(robot, step_time_s), _weights(seed)
    centre, half = home(robot), _half_range(robot)
    lower, upper = (np.array([getattr(j, key) for j in robot.joints]) for key in ('lower', 'upper'))
    statistics = {'state.q01': lower, 'state.q99': upper}

    def write(where: Path, offset: np.ndarray) -> None:
        actions = {
            'actions.q01': centre - ROW_NOISE * half * (1.0 + offset),
            'actions.q99': centre + ROW_NOISE * half * (1.0 - offset),
        }
        write_bundle(
            where, spec, weights=weights, statistics=statistics | actions, tokenizer=_TOKENIZER
        )

    with tempfile.TemporaryDirectory() as draft:
        write(Path(draft) / 'bundle', np.zeros(len(centre)))
        offset = _mean_action(Path(draft) / 'bundle', centre, half, seed)
    write(folder, offset)
    return folder


def _mean_action(bundle: Path, centre: np.ndarray, half: np.ndarray, seed: int) -> np.ndarray:
    """(joints,) mean normalised action over random observations."""
    random = np.random.default_rng(seed)
    policy = Policy.load(bundle, threads=1, verify=False)
    means = []
    for _ in range(_LOOKS):
        images = {
            name: random.integers(0, 256, (480, 640, 3), dtype=np.uint8)
            for name in policy.spec.camera_names
        }
        state = centre + half * random.uniform(-0.5, 0.5, len(half))
        chunk, _ = policy.infer(Observation(images, state.astype(np.float32), INSTRUCTION))
        means.append(((chunk.actions - centre) / (ROW_NOISE * half)).mean(axis=0))
    policy.close()
    return np.mean(means, axis=0)


_SCRIPTS = Path(__file__).parent
# Two status periods: the status then is newer than the question.
_STATUS_S = 0.45
_START_S = 30.0
# Memory is compared from here on, with filled caches and first chunks.
_WARM_S = 20.0
# What the soak changes in the shipped parameters. The latch needs a person after 20 clamped chunks,
# and one joint's actions are beyond its limit all the time.
_EXECUTOR = {'clamp_latch': 0}
_POLICY = {
    'torch_threads': 1,
    'cache_max_age_s': 0.5,
    'cache_max_reuses': 3,
    'cache_max_image_change': 5.0,
}


@dataclass(frozen=True)
class CameraSetup:
    """Behaviour of all cameras in a phase."""

    name: str
    rate_hz: float
    jitter_s: float = 0.0


class Memory:
    """Resident memory of a node: of each of its processes, from when it is warm."""

    def __init__(self) -> None:
        # Per process: when it was first seen, and pairs of seconds since then and MiB.
        self._seen: dict[int, tuple[float, list[tuple[float, float]]]] = {}

    def look(self, child: Child) -> None:
        """Record the process's memory now."""
        since_s, samples = self._seen.setdefault(child.pid, (time.monotonic(), []))
        seconds = time.monotonic() - since_s
        if seconds >= _WARM_S and child.running:
            samples.append((seconds, child.memory_mib()))

    def figures(self) -> list[dict[str, Any]]:
        """Memory over the life of each process that lived long enough, in order."""
        return [
            {
                'seconds': round(samples[-1][0] - samples[0][0], 1),
                'growth_mib': round(samples[-1][1] - samples[0][1], 2),
                # Evenly over its life: growth that ends is no leak.
                'mib': [round(mib, 1) for _, mib in samples[:: max(1, len(samples) // 16)]],
            }
            for _, samples in self._seen.values()
            if samples
        ]


class Rig:
    """One session: a policy of one step time, from the start of its nodes to their end.

    `control`: the executor's newest status; `strays`: frame_id and stamp of chunks that a fault
    sent; `strayed`: motion of a stopped robot beyond `STAYS`, in words; `most_stopped`: longest
    such way of a joint, rad; `problems`: of the harness; `exit_codes`: by process, at the end.
    """

    POLICY, EXECUTOR = '/vla_policy', '/vla_executor'

    def __init__(
        self, graph: Graph, profiles: Profiles, folder: Path, step_rate_hz: float, seed: int
    ) -> None:
        self.graph, self.profiles, self.folder = graph, profiles, folder
        self.step_rate_hz = step_rate_hz
        self.services = Services(graph)
        self.robot_path = folder / 'robot.yaml'
        self.robot_file = write_robot(self.robot_path)
        self.bundle = write_policy(folder / 'bundle', self.robot_file, 1.0 / step_rate_hz, seed)
        self.camera_topics = [camera.topic for camera in self.robot_file.cameras]
        self.camera_setup = CameraSetup('30 Hz', 30.0)
        self.faults: list[Fault] = []
        self.control: dict[str, str] = {}
        self.newest_chunk: Any | None = None
        self.strays: set[bytes] = set()
        self.strayed: list[str] = []
        self.most_stopped = 0.0
        # Whether the robot's motion counts as that of a stopped one, and a start is under way.
        self._judged = self._starts = False
        self._radians = [joint.unit == 'rad' for joint in self.robot_file.joints]
        self.problems: list[str] = []
        self.exit_codes: dict[str, list[int]] = {}
        self.memory = {'policy_node': Memory(), 'executor_node': Memory()}
        self._control_s = 0.0
        self._inferences: list[tuple[int, float]] = []
        self._listen()
        self.robot = SimulatedRobot(graph, self.robot_file, home(self.robot_file))
        self.frames_path, self.pulse_path = folder / 'frames.txt', folder / 'pulse.txt'
        self.held_path = folder / 'held.txt'
        self.held_path.touch()
        self._children: list[tuple[str, Child]] = []

    def begin(self) -> None:
        """Start every process, and bring both nodes up."""
        self.cameras = self._start(
            'cameras',
            [
                str(_SCRIPTS / 'camera_drivers.py'),
                *self.camera_topics,
                *('--frames', str(self.frames_path)),
            ],
            ends_with_stdin=True,
        )
        self._start(
            'pulse', [str(_SCRIPTS / 'soak_pulse.py'), str(self.pulse_path)], ends_with_stdin=True
        )
        self.executor = self._start_node('executor', _EXECUTOR)
        self.services.bring_up(self.EXECUTOR)
        self.start_policy()

    def _listen(self) -> None:
        node = self.graph.node
        node.create_subscription(chunk_type(), '/action_chunk', self._on_chunk, RELIABLE)
        node.create_subscription(
            DiagnosticArray, f'{self.POLICY}/report', self._on_report, RELIABLE
        )
        node.create_subscription(DiagnosticArray, '/diagnostics', self._on_status, RELIABLE)
        self._instruction = node.create_publisher(String, f'{self.POLICY}/instruction', LATCHED)
        self._instruction.publish(String(data=INSTRUCTION))

    def _on_chunk(self, message: Any) -> None:
        if serialize_message(message) not in self.strays:
            self.newest_chunk = message

    def _on_report(self, message: DiagnosticArray) -> None:
        values = values_of(message.status[0])
        milliseconds = float(values['ms.total']) + float(values['overhead_ms'])
        self._inferences.append((time.time_ns(), milliseconds * 1e-3))

    def _on_status(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == f'{self.EXECUTOR}: control':
                self.control = {**values_of(status), 'text': status.message}
                self._control_s = time.monotonic()
                self._judge_stopped_robot()

    def _judge_stopped_robot(self) -> None:
        """Note how far the motors have moved a robot that is stopped, from the rest on."""
        if self.runs or self._starts:
            self._starts &= not self.runs
            self._judged = False
        elif not self._judged:
            self._judged = self.control.get('kind') != 'track'
            self.robot.mark()
        else:
            ways = np.where(self._radians, self.robot.moved(), 0.0)
            worst = int(ways.argmax())
            self.most_stopped = max(self.most_stopped, float(ways[worst]))
            if ways[worst] > STAYS:
                self.strayed.append(
                    f'{self.robot_file.joints[worst].name} of a stopped robot moved by '
                    f'{ways[worst]:.3f} rad at {time.time_ns()}: {self.control["text"]}'
                )
                self.robot.mark()

    # ------------------------------------------------------------ processes

    def _start(self, name: str, words: list[str], *, ends_with_stdin: bool = False) -> Child:
        child = Child(
            words,
            self.folder / f'{name}.log',
            ends_with_stdin=ends_with_stdin,
            profile=self.profiles.executor if name == 'executor_node' else self.profiles.nodes,
        )
        self._children.append((name, child))
        return child

    def _start_node(self, name: str, parameters: dict[str, Any], *start_with: str) -> Child:
        given = {'bundle': self.bundle, 'robot': self.robot_path, **parameters}
        words = [word for key, value in given.items() for word in ('-p', f'{key}:={value}')]
        return self._start(
            f'{name}_node',
            [
                *(*(start_with or ('-m',)), MODULES[f'{name}_node'], '--ros-args'),
                *('--params-file', str(ROOT / 'config' / f'{name}.yaml')),
                *words,
            ],
        )

    def start_policy(self) -> None:
        """Start the policy node, configure and activate it."""
        watched = (str(_SCRIPTS / 'soak_pulse.py'), str(self.held_path))
        self.policy = self._start_node('policy', _POLICY, *watched)
        self.services.bring_up(self.POLICY)

    def launch_again(self, name: str) -> Child:
        """Start another executor of this robot, as a second launch does."""
        return Child(
            [
                *('-m', MODULES['executor_node'], '--ros-args', '-r', f'__node:={name}'),
                *('--params-file', str(ROOT / 'config' / 'executor.yaml')),
                *('-p', f'bundle:={self.bundle}', '-p', f'robot:={self.robot_path}'),
                *('-p', 'autostart:=true'),
            ],
            self.folder / 'executor_beside.log',
            profile=self.profiles.executor,
        )

    def kill_policy(self) -> None:
        """SIGKILL; nobody asks for its exit code."""
        self.policy.kill()
        self._children = [(name, child) for name, child in self._children if child.running]

    def change_camera(self, topic: str, **change: Any) -> None:
        """Change one camera's driver from now on."""
        self.cameras.say(json.dumps({'topic': topic, **change}))

    def set_up_cameras(self, setup: CameraSetup) -> None:
        self.camera_setup = setup
        for topic in self.camera_topics:
            self.change_camera(topic, rate_hz=setup.rate_hz, jitter_s=setup.jitter_s)

    def set(self, node: str, **parameters: Any) -> None:
        """Set live parameters; what is refused is noted."""
        reason = self.services.set(node, **parameters)
        if reason:
            self.problems.append(f'refused: {node} {parameters}: {reason}')

    def look_at_memory(self) -> None:
        self.memory['policy_node'].look(self.policy)
        self.memory['executor_node'].look(self.executor)

    # ------------------------------------------------------------ operator

    @property
    def runs(self) -> bool:
        """Return True if the executor's newest status says that it is started."""
        return self.control.get('mode') == 'running'

    def start_as_operator(self) -> str:
        """Start the robot again if it waits for a person; return its status, '' if it does not.

        Raises RuntimeError: it does not start.
        """
        asked_s = time.monotonic()
        while self._control_s < asked_s + _STATUS_S:
            if time.monotonic() > asked_s + _START_S:
                raise RuntimeError(f'no status of the executor for {_START_S:g} s')
            time.sleep(0.01)
        if self.runs:
            return ''
        text = self.control.get('text', '')
        if self.control.get('clamp_latched') == 'true':
            self.services.insist(Trigger, f'{self.EXECUTOR}/reset', Trigger.Request())
        answer = None
        while answer is None or not answer.success:
            if time.monotonic() > asked_s + _START_S:
                raise RuntimeError(f'the robot does not start: {answer}')
            self._starts = True
            answer = self.services.insist(Trigger, f'{self.EXECUTOR}/start', Trigger.Request())
            self._starts = answer.success
            time.sleep(0.0 if answer.success else 0.2)
        return text or 'not started'

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        """End every process as a user would, and note the exit codes."""
        # The executor first: what it sends last is a hold, not an answer to missing chunks.
        for name, child in sorted(self._children, key=lambda item: item[0] != 'executor_node'):
            self.exit_codes.setdefault(name, []).append(child.end())
        self.robot.close()

    def record(self) -> Record:
        """Return the recorded messages, once the session is over."""
        frames = _table(self.frames_path, columns=3)
        late = np.array(self.robot.late, np.int64).reshape(-1, 2)
        cut = cut_offs(self.logs().get('policy_node', ''), self.faults)
        self.faults = sorted([*self.faults, *cut], key=lambda fault: fault.begin_ns)
        record = Record(
            commands=self.robot.commands(),
            cameras=[
                Frames(*frames[frames[:, 0] == i, 1:].T) for i in range(len(self.camera_topics))
            ],
            inferences=np.array(self._inferences, dtype=np.float64).reshape(-1, 2),
            pulse=np.concatenate([_table(self.pulse_path, columns=2), late]),
            held=_table(self.held_path, columns=2),
            faults=self.faults,
        )
        commands = record.commands
        times_ns, places = self.robot.places
        np.savez(
            self.folder / 'record.npz',
            times_ns=times_ns,
            places=places,
            stamps_ns=commands.stamps_ns,
            arrivals_ns=commands.arrivals_ns,
            positions=commands.positions,
            inferences=record.inferences,
            pulse=record.pulse,
            held=record.held,
        )
        played = [asdict(fault) for fault in self.faults]
        (self.folder / 'faults.json').write_text(json.dumps(played, indent=1), encoding='utf-8')
        return record

    def logs(self) -> dict[str, str]:
        """Output of every process, by the name of its log."""
        return {path.stem: path.read_text(errors='replace') for path in self.folder.glob('*.log')}


def _table(path: Path, *, columns: int) -> np.ndarray:
    """(n, columns) int64 from lines of so many numbers; a last line that was cut is left out."""
    rows = [line.split() for line in path.read_text(encoding='ascii').splitlines(keepends=True)]
    whole = [row for row in rows if len(row) == columns]
    return np.array(whole, dtype=np.int64).reshape(-1, columns)
