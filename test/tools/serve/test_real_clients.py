"""Clients of other projects, unmodified, against the server.

Each has an environment of its own, whose Python a variable names:
- VLA_RUNTIME_OPENPI_PYTHON: `pip install openpi-client==0.1.2 typing_extensions 'numpy<2'`
- VLA_RUNTIME_G1_PYTHON: `pip install inspect-robots-unitree-g1==0.1.1 pyzmq msgpack msgpack-numpy`
- VLA_RUNTIME_VLA_EVAL_PYTHON: `pip install vla-eval==0.8.0`
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from policy_servers import running, tiny_bundle
from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import CameraSpec, StateSpec
from vla_runtime.remote.message_pack import pack, unpack
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.tabletop_world import TabletopWorld
from vla_tools.serve.request_keys import KeysFile

OPENPI, G1, VLA_EVAL = (
    os.environ.get(f'VLA_RUNTIME_{name}_PYTHON') for name in ('OPENPI', 'G1', 'VLA_EVAL')
)
HERE = Path(__file__).parent


def run_apart(python: str, script: str, *words: str) -> Any:
    """What a client's script writes, run by a Python that has the client."""
    done = subprocess.run(
        [python, str(HERE / script), *words],
        capture_output=True,
        text=True,
        env=plain_environment(),
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def plain_environment() -> dict[str, str]:
    """Variables of this environment lead another Python astray."""
    kept = {'PATH', 'HOME', 'LANG', 'TMPDIR'}
    return {name: value for name, value in os.environ.items() if name in kept}


@pytest.mark.skipif(not OPENPI, reason='VLA_RUNTIME_OPENPI_PYTHON names no Python with openpi')
@pytest.mark.parametrize('turns', [20, pytest.param(500, marks=pytest.mark.thorough)])
def test_chunks_of_openpis_clients_at_once_are_those_of_each_alone(
    turns: int, tmp_path: Path
) -> None:
    with running(tiny_bundle(tmp_path / 'tiny')) as server:
        found = run_apart(str(OPENPI), 'openpi_robots.py', str(server.port), '8', str(turns))
        batches = server.served.statistics.batches
    assert found == {'chunks': 8 * turns, 'unlike': 0, 'broker': True}
    assert max(batches) > 1


@pytest.mark.skipif(not OPENPI, reason='VLA_RUNTIME_OPENPI_PYTHON names no Python with openpi')
@pytest.mark.parametrize('episodes', [1, pytest.param(20, marks=pytest.mark.thorough)])
def test_openpis_broker_closes_the_loop_on_the_simulated_arm(episodes: int) -> None:
    with (
        closing(TabletopWorld()) as world,
        running(ROOT / 'engines' / 'demo') as server,
        Broker(str(OPENPI), server.port, horizon=8) as broker,
    ):
        outcomes = [outcome_of(world, broker, seed) for seed in range(1000, 1000 + episodes)]
    # 19 of 20 is what the policy itself reaches.
    assert outcomes.count('success') >= 0.95 * episodes


def outcome_of(world: TabletopWorld, broker: Broker, seed: int) -> str:
    """Drive an episode with a row of the broker a step, and nothing between it and the arm."""
    asked = world.begin(Condition(), seed, 0, True)
    broker.ask({})
    ticks = round(world.step_time_s / world.tick_s)
    while True:
        look = world.observe(asked.instruction)
        target = broker.ask(
            {
                **{f'observation/image/{name}': image for name, image in look.images.items()},
                'observation/state': look.state,
                'prompt': look.instruction,
            }
        )
        begin = world.measured()
        for tick in range(1, ticks + 1):
            world.step(begin + (target - begin) * tick / ticks)
            if (outcome := world.judge()) is not None:
                return outcome.name


class Broker:
    """openpi's broker in a process of its own, by `openpi_broker.py`."""

    def __init__(self, python: str, port: int, horizon: int) -> None:
        words = [python, str(HERE / 'openpi_broker.py'), str(port), str(horizon)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=plain_environment()
        )

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, look: dict[str, Any]) -> Any:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        message = pack(look)
        process.stdin.write(struct.pack('<I', len(message)) + message)
        process.stdin.flush()
        return unpack(process.stdout.read(*struct.unpack('<I', process.stdout.read(4))))


@pytest.mark.skipif(not G1, reason='VLA_RUNTIME_G1_PYTHON names no Python with this client')
def test_a_client_of_nvidias_wire_gets_the_chunks_of_its_robot(tmp_path: Path) -> None:
    sizes = {
        **dict.fromkeys(('left_arm', 'right_arm', 'left_hand', 'right_hand'), 7),
        'left_leg': 6,
        'right_leg': 6,
        'waist': 3,
    }
    groups = {name: [f'{name}_{i}' for i in range(size)] for name, size in sizes.items()}
    names = [name for group in groups.values() for name in group]
    spec = tiny_spec()
    action = spec.actions[0]
    spec = replace(
        spec,
        dims=replace(spec.dims, cameras=1, action_dim=32, prompt_length=400),
        cameras=(CameraSpec('ego_view'),),
        state=tuple(StateSpec(name, 'rad') for name in names),
        actions=tuple(replace(action, name=name) for name in names[:28]),
    )
    file = KeysFile(groups={name: ' '.join(group) for name, group in groups.items()})
    with running(tiny_bundle(tmp_path / 'tiny', spec), zmq=True, mapped=file) as server:
        found = run_apart(str(G1), 'g1_robot.py', str(server.zmq_port))
        assert server.served.statistics.answers == 3
    assert found == {'rows': 8, 'finite': True}


@pytest.mark.skipif(not VLA_EVAL, reason='VLA_RUNTIME_VLA_EVAL_PYTHON names no Python with it')
@pytest.mark.parametrize('steps', [12, pytest.param(120, marks=pytest.mark.thorough)])
def test_benchmarks_of_ai2s_harness_at_once_get_the_rows_of_each_alone(
    steps: int, tmp_path: Path
) -> None:
    with running(tiny_bundle(tmp_path / 'tiny')) as server:
        found = run_apart(
            str(VLA_EVAL), 'vla_eval_robots.py', str(server.port), '8', str(steps), '4'
        )
        answers = server.served.statistics.answers
    assert (found['rows'], found['unlike']) == (2 * 8 * steps, 0)
    assert 'images/head' in found['refusal']
    # A chunk for every fourth row, of the clients together and alone, and one after the refusal.
    assert answers == 2 * 2 * 8 * steps / 4 + 1
