"""One run of the executor under real ros2_control: controllers, a mock arm, a scripted policy.

Started by `ros2_control.py`, which says what is measured; prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
import yaml
from ament_index_python.packages import get_package_prefix
from control_msgs.msg import JointTrajectoryControllerState
from controller_manager_msgs.srv import ConfigureController, LoadController, SwitchController
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from safetensors.numpy import load_file, save_file
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64, Float64MultiArray, String
from std_srvs.srv import Trigger

from vla_runtime.messages.trajectories import (
    chunk_to_message,
    chunk_type,
    message_to_plan,
    ns_to_stamp,
    plan_type,
    stamp_to_ns,
)
from vla_runtime.types import ActionChunk, ChunkHeader

ROOT = Path(__file__).parents[2]
ARM = [f'joint_{index}' for index in range(1, 7)]
NAMES = (*ARM, 'gripper')
HOME = np.array([0.1, -0.9, 1.2, -0.4, 0.8, 0.0, 0.02])
HORIZON, STEP_S, AMPLITUDE, FREQUENCY_HZ, VELOCITY = 30, 0.05, 0.5, 0.25, 1.5
CONTROLLERS = ('joint_state_broadcaster', 'arm_controller', 'gripper_controller')
SCALING_TOPIC = '/speed_scaling_state_broadcaster/speed_scaling'
GRIPPER_TOPIC = 'gripper_commands'
_CALL_S = 20.0


def write_bundle(folder: Path) -> None:
    """Write a policy bundle of this arm; its weights are the demo's and are never run."""
    demo = ROOT / 'engines' / 'demo'
    spec = yaml.safe_load((demo / 'policy.yaml').read_text())
    spec['state'] = [{'name': name, 'unit': 'm' if name == 'gripper' else 'rad'} for name in NAMES]
    spec['actions'] = [{**one, 'kind': 'absolute'} for one in spec['state']]
    spec['dimensions'].update(action_dim=len(NAMES), horizon=HORIZON)
    folder.mkdir(parents=True)
    (folder / 'policy.yaml').write_text(yaml.safe_dump(spec))
    statistics = load_file(demo / 'statistics.safetensors')
    longer = {key: np.append(value, value[-1:]) for key, value in statistics.items()}
    save_file(longer, folder / 'statistics.safetensors')
    for name in ('tokenizer.model', 'weights.safetensors', 'verification.json'):
        shutil.copy(demo / name, folder / name)


def write_robot(
    file: Path, arm_output: dict[str, Any], gripper_topic: str, *, scaling: bool
) -> None:
    """Write the robot file of this arm."""
    limits = {'lower': -2.8, 'upper': 2.8, 'velocity': VELOCITY, 'acceleration': 8.0}
    joints = [{'name': name, 'unit': 'rad', **limits, 'max_step': 0.3} for name in ARM]
    gripper = {'name': 'gripper', 'unit': 'm', 'lower': 0.0, 'upper': 0.04, 'velocity': 0.1}
    spec = {
        'format': 1,
        'name': 'mock_arm',
        'joints': [*joints, {**gripper, 'grips': True, 'zero': 0.0, 'one': 0.04}],
        'cameras': [{'name': name, 'topic': f'{name}/image_raw'} for name in ('front', 'wrist')],
        'outputs': [
            arm_output,
            {
                'kind': 'float64_multi_array',
                'topic': gripper_topic,
                'joints': ['gripper'],
            },
        ],
        'start': {'tolerance': 0.15, 'on_too_far': 'approach', 'approach_speed': 0.3},
    }
    if scaling:
        spec['speed_scaling'] = {'topic': SCALING_TOPIC, 'full': 100.0}
    file.write_text(yaml.safe_dump(spec))


def urdf(command_interface: str) -> str:
    """Return a chain of six joints and a finger under mock hardware."""
    parts, hardware = ['<link name="base"/>'], []
    for index, name in enumerate(NAMES):
        parent = 'base' if index == 0 else f'link_{index}'
        kind = 'prismatic' if name == 'gripper' else 'revolute'
        limit = '<limit lower="-3" upper="3" velocity="2" effort="99"/>'
        parts.append(f'<link name="link_{index + 1}"/>')
        parts.append(
            f'<joint name="{name}" type="{kind}"><parent link="{parent}"/>'
            f'<child link="link_{index + 1}"/><axis xyz="0 0 1"/>{limit}</joint>'
        )
        interfaces = {'position', command_interface} if name != 'gripper' else {'position'}
        commands = ''.join(f'<command_interface name="{one}"/>' for one in sorted(interfaces))
        hardware.append(
            f'<joint name="{name}">{commands}<state_interface name="position">'
            f'<param name="initial_value">{HOME[index]}</param></state_interface>'
            '<state_interface name="velocity"/></joint>'
        )
    return (
        f'<robot name="mock_arm">{"".join(parts)}<ros2_control name="mock" type="system"><hardware>'
        '<plugin>mock_components/GenericSystem</plugin><param name="calculate_dynamics">true'
        f'</param></hardware>{"".join(hardware)}</ros2_control></robot>'
    )


def controllers(rate_hz: int, arm: dict[str, Any], *, forward: bool) -> dict[str, Any]:
    """Return the parameters of controller_manager and its controllers."""
    kind = 'forward_command_controller/ForwardCommandController'
    trajectory = 'joint_trajectory_controller/JointTrajectoryController'
    manager = {
        'update_rate': rate_hz,
        'joint_state_broadcaster': {'type': 'joint_state_broadcaster/JointStateBroadcaster'},
        'arm_controller': {'type': kind if forward else trajectory},
        'gripper_controller': {'type': kind},
    }
    gripper = {'joints': ['gripper'], 'interface_name': 'position'}
    of_nodes = {
        'controller_manager': manager,
        'arm_controller': {'joints': ARM, **arm},
        'gripper_controller': gripper,
    }
    return {name: {'ros__parameters': values} for name, values in of_nodes.items()}


class Rig:
    """Controllers, the executor of some checkout, and what both say.

    `states`: stamp, output, error and velocity of joint_1's output in every cycle; `sent`: steady
    time of every arm command.
    """

    def __init__(self, words: argparse.Namespace, work: Path) -> None:
        self.words, self.work = words, work
        self.states: list[tuple[float, float, float, float]] = []
        self.measured: list[tuple[float, float]] = []
        self.reasons: list[tuple[float, str, str]] = []
        self.number, self.scaling = 0, 1.0
        rclpy.init()
        self.node = node = Node('driver')
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._description = node.create_publisher(String, 'robot_description', latched)
        self._description.publish(String(data=urdf(words.interface)))
        self._chunks = node.create_publisher(chunk_type(), 'action_chunk', 10)
        self._scaling = node.create_publisher(Float64, SCALING_TOPIC, 10)
        node.create_subscription(plan_type(), 'committed_plan', self._answer, 10)
        node.create_subscription(
            JointTrajectoryControllerState, 'arm_controller/controller_state', self._state, 2000
        )
        node.create_subscription(JointState, 'joint_states', self._joints, 2000)
        node.create_subscription(DiagnosticArray, '/diagnostics', self._status, 50)
        node.create_subscription(Float64MultiArray, GRIPPER_TOPIC, lambda _: None, 10)
        node.create_timer(0.01, lambda: self._scaling.publish(Float64(data=100.0 * self.scaling)))
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        threading.Thread(target=executor.spin, daemon=True).start()
        self.scale_file = work / 'scaling'
        self.scale(1.0)

    def scale(self, factor: float) -> None:
        """Move the slider: the controller's file, then what the robot says."""
        part = self.scale_file.with_suffix('.part')
        part.write_text(str(factor))
        part.replace(self.scale_file)
        self.scaling = factor

    # ------------------------------------------------------------ processes

    def start_controllers(self, arm: dict[str, Any], *, forward: bool, off=()) -> None:
        file = self.work / 'controllers.yaml'
        made = controllers(self.words.rate, arm, forward=forward)
        file.write_text(yaml.safe_dump(made))
        prefix = get_package_prefix('controller_manager')
        command = [f'{prefix}/lib/controller_manager/ros2_control_node']
        environment = dict(pair.split('=', 1) for pair in self.words.node_environment)
        if self.words.scale_variable:
            environment[self.words.scale_variable] = str(self.scale_file)
        self._controllers = subprocess.Popen(
            [*command, '--ros-args', '--params-file', str(file)],
            env={**os.environ, **environment},
            stdout=(self.work / 'controllers.log').open('w'),
            stderr=subprocess.STDOUT,
        )
        for name in CONTROLLERS:
            self._manage(LoadController, 'load_controller', name=name)
            self._manage(ConfigureController, 'configure_controller', name=name)
        self.switch(on=[name for name in CONTROLLERS if name not in off])

    def switch(self, on=(), off=()) -> None:
        self._manage(
            SwitchController,
            'switch_controller',
            activate_controllers=list(on),
            deactivate_controllers=list(off),
            strictness=SwitchController.Request.STRICT,
        )

    def _manage(self, kind: Any, service: str, **fields: Any) -> None:
        answer = self._call(kind, f'/controller_manager/{service}', kind.Request(**fields))
        if not answer.ok:
            raise RuntimeError(f'{service} {fields} failed: {self.work}/controllers.log')

    def start_executor(self) -> None:
        code = Path(self.words.code)
        robot, bundle = self.work / 'robot.yaml', self.work / 'bundle'
        given = {
            'bundle': bundle,
            'robot': robot,
            'autostart': 'true',
            'control_rate_hz': float(self.words.control_rate),
        }
        command = [sys.executable, '-m', 'vla_runtime.nodes.executor.node', '--ros-args']
        command += ['--params-file', str(code / 'config' / 'executor.yaml')]
        for key, value in given.items():
            command += ['-p', f'{key}:={value}']
        paths = [str(code), *os.environ.get('PYTHONPATH', '').split(':')[1:]]
        self._executor = subprocess.Popen(
            command,
            env={**os.environ, 'PYTHONPATH': ':'.join(paths)},
            cwd=self.work,
            stdout=(self.work / 'executor.log').open('w'),
            stderr=subprocess.STDOUT,
        )

    def kill_executor(self) -> None:
        self._executor.kill()

    def start(self, tries: int = 20) -> Any:
        """Call `~/start` until it is done; return the last answer."""
        for _ in range(tries):
            answer = self._call(Trigger, '/vla_executor/start', Trigger.Request())
            if answer.success:
                break
            time.sleep(0.3)
        return answer

    def close(self) -> None:
        for process in (self._executor, self._controllers):
            process.send_signal(signal.SIGINT)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()

    def _call(self, kind: Any, name: str, request: Any) -> Any:
        client = self.node.create_client(kind, name)
        if not client.wait_for_service(timeout_sec=_CALL_S):
            raise RuntimeError(f'{name} is not there: see the logs in {self.work}')
        future, end_s = client.call_async(request), time.monotonic() + _CALL_S
        while not future.done() and time.monotonic() < end_s:
            time.sleep(0.005)
        self.node.destroy_client(client)
        return future.result()

    # ------------------------------------------------------------ topics

    def _state(self, state: JointTrajectoryControllerState) -> None:
        positions, velocities = state.output.positions, state.output.velocities
        self.states.append(
            (
                stamp_to_ns(state.header.stamp) * 1e-9,
                positions[0] if positions else np.nan,
                velocities[0] if velocities else np.nan,
                state.error.positions[0],
            )
        )

    def _joints(self, message: JointState) -> None:
        if ARM[0] in message.name:
            at = stamp_to_ns(message.header.stamp) * 1e-9
            self.measured.append((at, message.position[message.name.index(ARM[0])]))

    def _answer(self, message: Any) -> None:
        plan = message_to_plan(message)
        now_ns = self.node.get_clock().now().nanoseconds
        ahead = max(0.0, (now_ns - plan.stamp_ns) * 1e-9 / STEP_S) if len(plan.rows) else 0.0
        phase = 2.0 * np.pi * FREQUENCY_HZ * STEP_S * ((plan.step or 0) + ahead)
        phases = phase + 2.0 * np.pi * FREQUENCY_HZ * STEP_S * np.arange(HORIZON)
        amplitudes = np.where(np.array(NAMES) == 'gripper', 0.01, AMPLITUDE)
        rows = HOME + amplitudes * np.sin(phases)[:, None]
        chunk = ActionChunk(
            rows, NAMES, ('position',) * 7, STEP_S, np.zeros((HORIZON, 0), np.float32)
        )
        self.number += 1
        self._chunks.publish(
            chunk_to_message(
                chunk,
                ChunkHeader(
                    stamp_to_ns(ns_to_stamp(now_ns)),
                    plan.episode,
                    self.number,
                    tied=False,
                    request=plan.request,
                ),
            )
        )

    def _status(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == '/vla_executor: control':
                values = {one.key: one.value for one in status.values}
                found = values.get('reason', ''), status.message
                if not self.reasons or self.reasons[-1][1:] != found:
                    self.reasons.append((time.monotonic(), *found))


# ------------------------------------------------------------ what is measured


def motion(stamps_s: np.ndarray, positions: np.ndarray, rate_hz: int) -> dict[str, Any]:
    """Return the figures of a position's motion, by the cycles' own times.

    The ripple is a cycle's speed against the mean of 60 ms around it, where above 0.3 rad/s.
    """
    stamps_s, first = np.unique(stamps_s, return_index=True)
    spans_s = np.diff(stamps_s)
    speeds = np.diff(positions[first]) / spans_s
    width = max(3, int(0.06 * rate_hz))
    smooth = np.convolve(speeds, np.ones(width) / width, 'same')
    fast = np.abs(smooth) > 0.3
    fast[:width] = fast[-width:] = False
    ratio = speeds[fast] / smooth[fast]
    accelerations = np.abs(np.diff(speeds) / spans_s[1:])
    return {
        'cycles': len(stamps_s),
        'ripple_rms': float(np.sqrt(np.mean((ratio - 1.0) ** 2))),
        'speed_share_p1': float(np.percentile(ratio, 1)),
        'speed_share_p99': float(np.percentile(ratio, 99)),
        'fastest_cycle': float(np.abs(speeds).max()),
        'cycles_beyond_limit': float(np.mean(np.abs(speeds) > VELOCITY)),
        'acceleration_p50': float(np.median(accelerations)),
        'acceleration_p99': float(np.percentile(accelerations, 99)),
        'longest_cycle_ms': float(1e3 * spans_s.max()),
    }


def measure_ripple(rig: Rig) -> dict[str, Any]:
    rig.start()
    time.sleep(3.0)
    begun = len(rig.measured if rig.words.case == 'forward' else rig.states)
    time.sleep(5.0)
    if rig.words.case == 'forward':
        return motion(*np.array(rig.measured[begun:]).T, rig.words.rate)
    rows = np.array(rig.states[begun:])
    return motion(rows[:, 0], rows[:, 1], rig.words.rate)


def measure_kill(rig: Rig) -> dict[str, Any]:
    """Kill the executor at 0.7 rad/s or more, and see how the arm comes to rest."""
    rig.start()
    time.sleep(3.0)
    end_s = time.monotonic() + 10.0
    while time.monotonic() < end_s:
        (before_s, before, *_), (after_s, after, *_) = rig.states[-20], rig.states[-1]
        if abs(after - before) > 0.7 * (after_s - before_s):
            break
        time.sleep(0.002)
    rig.kill_executor()
    killed_s = rig.node.get_clock().now().nanoseconds * 1e-9
    time.sleep(1.0)
    rows = np.array(rig.states)
    stamps_s, first = np.unique(rows[:, 0], return_index=True)
    recent = stamps_s > killed_s - 0.1
    stamps_s, positions = stamps_s[recent], rows[first[recent], 1]
    speeds = np.diff(positions) / np.diff(stamps_s)
    braking = stamps_s[2:] > killed_s - 0.02
    every_s = np.arange(stamps_s[0], stamps_s[-1], 0.01)
    smooth = np.diff(np.interp(every_s, stamps_s, positions), 2) * 1e4
    moving = np.abs(speeds) > 0.01
    return {
        'speed': float(np.abs(speeds[stamps_s[1:] < killed_s]).mean()),
        'braking_in_a_cycle': float(np.abs(np.diff(speeds) / np.diff(stamps_s)[1:])[braking].max()),
        'braking_over_10_ms': float(np.abs(smooth[every_s[2:] > killed_s - 0.02]).max()),
        'way': float(abs(positions[-1] - np.interp(killed_s, stamps_s, positions))),
        'seconds': float(stamps_s[1:][moving][-1] - killed_s),
    }


def measure_velocity(rig: Rig) -> dict[str, Any]:
    rig.start()
    time.sleep(3.0)
    begun = len(rig.states)
    time.sleep(5.0)
    error = np.abs(np.array(rig.states[begun:])[:, 3])
    return {'error_max': float(error.max()), 'error_rms': float(np.sqrt(np.mean(error**2)))}


def measure_scaling(rig: Rig) -> dict[str, Any]:
    rig.start()
    time.sleep(2.0)
    found = {}
    for factor in (1.0, 0.3, 0.0, 1.0):
        rig.scale(factor)
        time.sleep(1.0)
        begun = len(rig.states)
        time.sleep(3.0 if factor in (0.0, 1.0) else 6.0)
        rows = np.array(rig.states[begun:])
        stamps_s, first = np.unique(rows[:, 0], return_index=True)
        speeds = np.diff(rows[first, 1]) / np.diff(stamps_s)
        key = f'{factor:g}' if f'{factor:g}' not in found else f'{factor:g} again'
        found[key] = {
            'mean_speed': float(np.abs(np.diff(rows[first, 1])).sum() / np.ptp(stamps_s)),
            'fastest_cycle': float(np.abs(speeds).max()),
            'reason': rig.reasons[-1][1],
        }
    return found


def measure_switch(rig: Rig) -> dict[str, Any]:
    """Largest step of the measured position in a cycle at a switching on, by seconds off."""
    found = {}
    for off_s in (0.2, 0.6, 3.0):
        rig.start()
        time.sleep(1.5)
        rig.switch(off=['arm_controller'])
        time.sleep(off_s)
        begun = len(rig.measured)
        rig.switch(on=['arm_controller'])
        time.sleep(1.0)
        steps = np.abs(np.diff(np.array(rig.measured[begun:])[:, 1]))
        found[f'{off_s:g}'] = {'largest_step': float(steps.max()), 'reason': rig.reasons[-1][1]}
    return found


def measure_refusal(rig: Rig) -> dict[str, Any]:
    begun_s = time.monotonic()
    answer = rig.start(tries=4)
    if not answer.success:
        return {'started': False, 'text': answer.message}
    begun_s = time.monotonic()
    time.sleep(4.0)
    named = [(at - begun_s, text) for at, _, text in rig.reasons if "controller '" in text]
    after_s, text = named[0] if named else (None, rig.reasons[-1][2])
    return {'started': True, 'named_after_s': after_s, 'text': text}


CASES: dict[str, Any] = {
    'ripple': measure_ripple,
    'kill': measure_kill,
    'forward': measure_ripple,
    'velocity': measure_velocity,
    'scaling': measure_scaling,
    'switch': measure_switch,
    'partial': measure_refusal,
    'inactive': measure_refusal,
    'steps': measure_refusal,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('case', choices=CASES)
    parser.add_argument('--rate', type=int, default=250)
    parser.add_argument('--control-rate', type=float, default=100.0)
    parser.add_argument('--code', default=str(ROOT))
    parser.add_argument('--work', type=Path, required=True)
    parser.add_argument('--scale-variable', default='')
    parser.add_argument('--node-environment', nargs='*', default=[])
    words = parser.parse_args()
    words.interface = 'velocity' if words.case == 'velocity' else 'position'
    forward = words.case == 'forward'
    arm: dict[str, Any] = {'interface_name': 'position'}
    if not forward:
        arm = {
            'command_interfaces': [words.interface],
            'state_interfaces': ['position', 'velocity'],
        }
    if words.case == 'velocity':
        arm['gains'] = {joint: {'p': 5.0, 'ff_velocity_scale': 1.0} for joint in ARM}
    if words.case == 'steps':
        arm['interpolation_method'] = 'none'
    output = {'kind': 'joint_trajectory', 'topic': 'arm_controller/joint_trajectory', 'joints': ARM}
    if forward:
        output.update(kind='float64_multi_array', topic='arm_controller/commands')
    words.work.mkdir(parents=True)
    write_bundle(words.work / 'bundle')
    has_scaling = words.case == 'scaling' and any(Path(words.code).glob('docs/**/ros2_control.md'))
    gripper_topic = 'gripper_controller/commands'
    if words.case == 'partial':
        # The arm's controller has the gripper too, which somebody else is sent.
        arm['joints'] = [*ARM, 'gripper']
        gripper_topic = GRIPPER_TOPIC
    write_robot(words.work / 'robot.yaml', output, gripper_topic, scaling=has_scaling)
    rig = Rig(words, words.work)
    off = ('arm_controller',) if words.case == 'inactive' else ()
    off = (*off, 'gripper_controller') if words.case == 'partial' else off
    rig.start_controllers(arm, forward=forward, off=off)
    rig.start_executor()
    try:
        print(json.dumps(CASES[words.case](rig)), flush=True)
    finally:
        rig.close()
        os._exit(0)


if __name__ == '__main__':
    main()
