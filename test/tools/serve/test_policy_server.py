"""Robots on one server: contract, sessions, batches, plans, faults, over a real socket."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from family_contracts.robot import CAMERAS, JOINTS
from mutations import mutated
from paths import ROOT
from policy_servers import PATIENCE_S, Client, Running, request, running, tiny_bundle, wait_for
from tiny_policy import tiny_spec
from websockets.exceptions import ConnectionClosed, InvalidStatus

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import CameraSpec, StateSpec
from vla_runtime.bundle.success import spec_identity
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.remote.message_pack import pack
from vla_runtime.types import CommittedPlan, Observation
from vla_tools.serve.served_policy import ServeOptions
from vla_tools.serve.socket_connection import WireLimits
from vla_tools.serve.uvicorn_server import HttpOptions

GOLDEN = ROOT / 'test' / 'golden' / 'openpi_wire'
ROBOTS, TURNS = 8, 6


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp('bundle') / 'tiny')


@pytest.fixture(scope='module')
def server(bundle: Path) -> Iterator[Running]:
    with running(bundle) as found:
        yield found


@pytest.fixture(scope='module')
def policy(bundle: Path) -> Iterator[Policy]:
    """The same policy without a server."""
    policy = Policy.load(bundle, 'torch', threads=1)
    yield policy
    policy.close()


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(server.url) as one:
        yield one


def seen(message: dict[str, Any]) -> Observation:
    images = {name: message[f'observation/image/{name}'] for name in CAMERAS}
    return Observation(images, message['observation/state'], message['prompt'])


def test_the_contract_comes_first(client: Client, bundle: Path) -> None:
    told, spec = client.metadata, read_bundle(bundle).spec
    assert told['bundle_sha256'] == spec_identity(spec)
    assert [camera['name'] for camera in told['cameras']] == [*CAMERAS]
    assert [item['name'] for item in told['state']] == [*JOINTS]
    assert [(a['name'], a['unit'], a['kind']) for a in told['actions']] == [
        (name, 'rad', 'position') for name in JOINTS
    ]
    assert (told['action_horizon'], told['rate_hz'], told['protocol']) == (
        spec.real_horizon,
        20.0,
        1,
    )
    assert told['takes_noise'] and told['takes_plan'] and told['reads_instruction']
    assert told['batch_exact'] is True and told['batch_bound'] == 0.0
    assert len(told['session_id']) == 32


def test_a_chunk_is_the_policys_own(client: Client, policy: Policy) -> None:
    policy.reset()
    for look in (1, 1, 2):
        message = request(look)
        reply = client.ask(message)
        expected, report = policy.infer(seen(message))
        assert np.array_equal(reply['actions'], expected.actions)
        assert reply['actions'].dtype == np.float64
        facts = reply['vla_runtime']
        assert (facts['number'], facts['seed']) == (report.number, 0)
        assert facts['cache_prefix'].startswith(report.cache.prefixes[0].reuse.value)
    assert reply['server_timing']['prev_total_ms'] > 0.0


def rows_of(reply: Any) -> Any:
    """Arrays and lists of a reply, of which openpi's broker takes rows."""
    if isinstance(reply, dict):
        return [found for item in reply.values() for found in rows_of(item)]
    return [reply] if isinstance(reply, (np.ndarray, list)) else []


def test_openpis_broker_finds_a_row_of_each_step_in_every_array(client: Client) -> None:
    assert [len(array) for array in rows_of(client.ask(request()))] == [8]


def test_noise_seed_and_number_are_the_requests(client: Client, policy: Policy) -> None:
    message = request(3)
    noise = np.random.default_rng(5).standard_normal(client.metadata['noise_shape'], np.float32)
    expected = policy.infer(seen(message), noise=noise)[0].actions
    assert np.array_equal(client.actions({**message, 'noise': noise}), expected)
    settings = PolicySettings(seed=9, denoise_steps=2)
    expected = policy.infer(seen(message), settings=settings, number=4)[0].actions
    asked = {**message, 'seed': 9, 'number': 4, 'settings': {'denoise_steps': 2}}
    assert np.array_equal(client.actions(asked), expected)


@pytest.mark.parametrize('sends_plan', [False, True])
def test_a_chunk_continues_the_plan(client: Client, policy: Policy, sends_plan: bool) -> None:
    first, second = request(1), request(2)
    last = client.actions({**first, 'number': 0})
    plan = CommittedPlan(last[3:], 2, 5)
    settings = PolicySettings(rtc_mode='guided')
    expected = policy.infer(seen(second), settings=settings, plan=plan, number=1)[0].actions
    given = {'plan': last[3:]} if sends_plan else {'executed_steps': 3}
    reply = client.ask({**second, **given, 'delay_steps': 2, 'number': 1})
    assert np.array_equal(reply['actions'], expected)
    assert reply['vla_runtime']['rtc_mode'] == 'guided'
    free = policy.infer(seen(second), number=1)[0].actions
    assert np.abs(free - expected).max() > 1e-4


def test_a_plan_is_continued_whatever_else_is_set(client: Client) -> None:
    client.actions(request())
    mode = {}
    for settings in ({'denoise_steps': 2}, {'rtc_mode': 'off'}):
        facts = client.ask(request(executed_steps=3, settings=settings))['vla_runtime']
        mode[next(iter(settings))] = facts['rtc_mode']
    assert mode == {'denoise_steps': 'guided', 'rtc_mode': 'off'}


def test_a_plan_that_is_over_or_was_never_there(client: Client) -> None:
    assert 'executed_steps' in client.ask(request(executed_steps=1))
    client.actions(request())
    assert client.ask(request(executed_steps=8))['vla_runtime']['rtc_mode'] == 'off'
    assert 'delay_steps' in client.ask(request(executed_steps=6, delay_steps=3))
    client.ask({'endpoint': 'reset'})
    assert 'executed_steps' in client.ask(request(executed_steps=1))


def test_steps_are_counted_in_a_chunk_of_this_connection_alone(server: Running) -> None:
    """Whether a robot got the last one before it lost its link, nobody here knows."""
    with Client(server.url) as client:
        last = client.actions(request(1, number=0))
        name = client.metadata['session_id']
    wait_for(lambda: not any(one.name == name for one in server.served.sessions.connected))
    with Client(server.url) as client:
        told = client.ask(request(2, session_id=name, executed_steps=3))
        assert isinstance(told, str) and told.startswith('executed_steps')
        facts = client.ask(request(2, session_id=name, plan=last[3:]))['vla_runtime']
        assert facts['rtc_mode'] == 'guided'


def test_a_seed_among_the_settings_is_the_requests_own(client: Client) -> None:
    client.ask({'endpoint': 'reset', 'seed': 5})
    asked = request(1, number=0, settings={'seed': 8})
    assert client.ask(asked)['vla_runtime']['seed'] == 8
    assert client.ask(request(1))['vla_runtime']['seed'] == 5
    assert client.ask({**asked, 'seed': 3}).startswith('seed')


def test_a_reset_with_a_seed_that_a_policy_has_no_use_for_changes_nothing(tmp_path: Path) -> None:
    with (
        running(tiny_bundle(tmp_path / 'act', tiny_spec('act'))) as server,
        Client(server.url) as client,
    ):
        told = client.ask({'endpoint': 'reset', 'seed': 3})
        assert isinstance(told, str) and told.startswith('seed')
        assert client.ask(request(1, prompt=''))['vla_runtime']['number'] == 0


def test_the_age_of_an_observation_goes_on_at_the_server(client: Client) -> None:
    facts = client.ask(request(age=0.5))['vla_runtime']
    assert 500.0 < facts['observation_age_ms'] < 500.0 + PATIENCE_S * 1e3


def look_of(robot: int, turn: int) -> dict[str, Any]:
    """Every other robot sees in turn 1 what it saw in turn 0."""
    look = 100 * robot + (0 if turn == 1 and robot % 2 else turn)
    return request(look, prompt=f'task {robot % 3}', seed=robot)


def run_robot(server: Running, robot: int, start: threading.Barrier | None) -> list[np.ndarray]:
    chunks = []
    with Client(server.url) as client:
        for turn in range(TURNS):
            if start is not None:
                start.wait(PATIENCE_S)
            chunks.append(client.actions(look_of(robot, turn)))
    return chunks


def test_chunks_of_many_at_once_are_those_of_each_alone(server: Running) -> None:
    start = threading.Barrier(ROBOTS)
    before = dict(server.served.statistics.batches)
    with ThreadPoolExecutor(ROBOTS) as pool:
        found = [pool.submit(run_robot, server, robot, start) for robot in range(ROBOTS)]
        together = [future.result() for future in found]
    batches = server.served.statistics.batches
    assert any(size > 1 and count > before.get(size, 0) for size, count in batches.items())
    for robot in range(ROBOTS):
        for one, alone in zip(together[robot], run_robot(server, robot, None), strict=True):
            assert np.array_equal(one, alone)


def test_a_reset_is_of_one_robot(server: Running) -> None:
    with Client(server.url) as one, Client(server.url) as other:
        first = one.actions(request(1))
        other.actions(request(1))
        assert one.ask({'endpoint': 'reset'})['status'] == 'reset'
        again, going_on = one.ask(request(1)), other.ask(request(1))
        assert np.array_equal(again['actions'], first)
        assert again['vla_runtime']['cache_prefix'].startswith('miss')
        assert going_on['vla_runtime']['cache_prefix'].startswith('hit')
        assert going_on['vla_runtime']['number'] == 1
        one.ask({'endpoint': 'reset', 'seed': 4})
        assert one.ask(request(1))['vla_runtime']['seed'] == 4


def test_a_robot_that_comes_back_goes_on(server: Running) -> None:
    with Client(server.url) as client:
        client.actions(request(1))
        name = client.metadata['session_id']
    wait_for(lambda: not any(one.name == name for one in server.served.sessions.connected))
    with Client(server.url) as client:
        facts = client.ask(request(1, session_id=name))['vla_runtime']
        assert facts['number'] == 1 and facts['cache_prefix'].startswith('hit')


def test_two_robots_with_one_session_are_told_apart(server: Running) -> None:
    with Client(server.url) as one, Client(server.url) as other:
        one.actions(request(1, session_id='arm'))
        assert 'session_id' in other.ask(request(2, session_id='arm'))
        with pytest.raises(ConnectionClosed) as closed:
            other.reply()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        assert one.ask(request(1))['vla_runtime']['number'] == 1


def test_a_session_ends_after_its_time_and_its_memory_is_used_again(bundle: Path) -> None:
    with running(bundle, options=ServeOptions(keep_s=0.0)) as server:
        for _ in range(3):
            with Client(server.url) as client:
                assert client.ask(request(1))['vla_runtime']['number'] == 0
            wait_for(lambda: len(server.served.sessions) == 0)
        # The check of the batches has made eight, and the policy has one of its own.
        wait_for(lambda: len(server.policy._free_caches) == 8)
        assert len(server.policy._sessions) == 1


def test_there_are_as_many_sessions_as_were_said(bundle: Path) -> None:
    with running(bundle, options=ServeOptions(max_sessions=2)) as server:
        with Client(server.url), Client(server.url):
            with pytest.raises(InvalidStatus) as refused:
                Client(server.url)
            assert refused.value.response.status_code == 503
        wait_for(lambda: len(server.served.sessions) == 0)
        with Client(server.url) as client:
            client.actions(request())


@pytest.mark.parametrize('robot', ['droid', 'libero', 'aloha'])
def test_openpis_robots_are_answered_as_they_are(robot: str, tmp_path: Path) -> None:
    asked = (GOLDEN / f'request_{robot}.msgpack').read_bytes()
    cameras, states = {
        'droid': (('base_0_rgb', 'left_wrist_0_rgb'), 8),
        'libero': (('image', 'wrist_image'), 8),
        'aloha': (('cam_high', 'cam_left_wrist'), 14),
    }[robot]
    names = tuple(f's{i}' for i in range(states))
    spec = tiny_spec()
    actions = tuple(replace(spec.actions[0], name=name) for name in names)
    spec = replace(
        spec,
        dims=replace(spec.dims, action_dim=16),
        cameras=tuple(map(CameraSpec, cameras)),
        state=tuple(StateSpec(name, 'rad') for name in names),
        actions=actions,
    )
    with running(tiny_bundle(tmp_path / 'tiny', spec)) as server, Client(server.url) as client:
        client.socket.send(asked)
        reply = client.reply()
        assert isinstance(reply, dict), reply
        assert reply['actions'].shape == (8, states) and np.isfinite(reply['actions']).all()


NOT_FITTING: dict[str, Any] = {
    'observation/state': {'observation/state': np.array([0.1, np.nan, 0.2])},
    'observation/image/top': {'observation/image/top': np.zeros((3, 5), np.uint8)},
    'noise': {'noise': np.zeros((2, 2), np.float32)},
    'settings': {'settings': {'denoise_steps': 5000}},
    'plan.actions': {'plan': np.zeros((2, 9))},
    'prompt': {'prompt': ''},
    'cfg_beta': {'settings': {'cfg_beta': 2.0}},
}


@pytest.mark.parametrize('key', NOT_FITTING)
def test_what_does_not_fit_is_told_in_text_and_the_session_goes_on(
    server: Running, key: str
) -> None:
    with Client(server.url) as client:
        before = client.actions(request(1, number=0))
        told = client.ask(request(1, **NOT_FITTING[key]))
        assert isinstance(told, str) and key in told
        assert sum(one.faults for one in server.served.sessions.connected) == 1
        assert 'Traceback' not in told and '/tmp' not in told
        reply = client.ask(request(1, number=0))
        assert np.array_equal(reply['actions'], before)


def test_a_text_frame_is_told_so(client: Client) -> None:
    client.socket.send('{}')
    assert 'binary' in client.reply()
    client.actions(request())


def test_a_bad_request_fails_alone_beside_good_ones(server: Running) -> None:
    start = threading.Barrier(4)

    def ask(robot: int) -> Any:
        with Client(server.url) as client:
            start.wait(PATIENCE_S)
            bad = {'noise': np.zeros((2, 2), np.float32)} if robot == 2 else {}
            return client.ask(request(robot, **bad))

    with ThreadPoolExecutor(4) as pool:
        replies = [future.result() for future in [pool.submit(ask, robot) for robot in range(4)]]
    assert [isinstance(reply, str) for reply in replies] == [False, False, True, False]


@pytest.mark.parametrize('count', [300, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_mutated_frames_are_answered_and_change_nothing_for_others(
    server: Running, count: int
) -> None:
    small = {f'observation/image/{name}': np.full((12, 16, 3), 7, np.uint8) for name in CAMERAS}
    good = pack({**request(1), **small, 'settings': {'denoise_steps': 2}, 'number': 0})
    with Client(server.url) as client, Client(server.url) as other:
        expected = other.actions(request(1, number=0))
        texts = 0
        for index in range(count):
            client.socket.send(mutated(good, Random(f'frames/{index}')))
            try:
                reply = client.reply()
            except ConnectionClosed:
                # It named another robot's session.
                raise AssertionError(f'frames/{index} ended the session') from None
            texts += isinstance(reply, str)
            assert isinstance(reply, str) or np.isfinite(reply['actions']).all()
        assert 0 < texts < count
        client.socket.send(good)
        assert isinstance(client.reply(), dict)
        assert np.array_equal(other.actions(request(1, number=0)), expected)


def test_a_fault_of_the_engine_is_told_without_its_inner_parts(
    server: Running, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = client.actions(request(1, number=0))
    with monkeypatch.context() as broken:

        def fail(*_: Any) -> None:
            raise RuntimeError(f'out of memory in {__file__}')

        broken.setattr(server.policy._engine, 'run_steps', fail)
        told = client.ask(request(2))
    assert 'RuntimeError' in told and 'memory' not in told and '/' not in told
    assert np.array_equal(client.actions(request(1, number=0)), before)


def test_a_policy_that_has_ended_closes_the_session(bundle: Path) -> None:
    with running(bundle) as server, Client(server.url) as client:
        client.actions(request())
        server.served.close()
        assert 'policy' in client.ask(request())
        with pytest.raises(ConnectionClosed) as closed:
            client.reply()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
        with pytest.raises(InvalidStatus):
            Client(server.url)


def test_a_slow_computation_breaks_no_keepalive(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = {'ping_interval': 0.5, 'ping_timeout': 1.0}
    running_server = running(bundle, http=HttpOptions(ping_s=0.75))
    with running_server as server, Client(server.url, **pings) as client:
        expected = client.actions(request(1, number=0))
        run, waited = server.policy._engine.run_steps, threading.Event()

        def slow() -> None:
            waited.wait(2.0)
            run()

        monkeypatch.setattr(server.policy._engine, 'run_steps', slow)
        assert np.array_equal(client.actions(request(1, number=0)), expected)
        assert np.array_equal(client.actions(request(1, number=0)), expected)


@pytest.mark.parametrize(('batch', 'exact', 'most'), [('off', True, 1), ('exact', True, 8)])
def test_batches_are_as_was_said(bundle: Path, batch: Any, exact: bool, most: int) -> None:
    with running(bundle, options=ServeOptions(batch=batch)) as server:
        assert server.served.metadata['batch_exact'] is exact
        assert server.served.metadata['max_batch'] == most


def test_exact_refuses_batches_that_are_not(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_tools.serve import served_policy
    from vla_tools.serve.batch_check import Exactness

    found = Exactness(False, 1e-6, 'within 1e-06')
    monkeypatch.setattr(served_policy, 'check_batches', lambda *_: found)
    for batch, most, exact, bound in (('exact', 1, True, 0.0), ('auto', 8, False, 1e-6)):
        with running(bundle, options=ServeOptions(batch=batch)) as server:  # type: ignore[arg-type]
            told = server.served.metadata
            assert (told['max_batch'], told['batch_exact'], told['batch_bound']) == (
                most,
                exact,
                bound,
            )


def test_requests_beyond_the_rate_are_refused_one_by_one(bundle: Path) -> None:
    limited = running(bundle, limits=WireLimits(requests_per_s=1.0))
    with limited as server, Client(server.url) as client:
        replies = [client.ask(request()) for _ in range(10)]
        refused = [reply for reply in replies if isinstance(reply, str)]
        assert isinstance(replies[0], dict) and refused and 'a second' in refused[0]


def test_a_policy_is_found_by_its_name(server: Running) -> None:
    for path in ('/policies/tiny', '/v1/realtime/robot/openpi'):
        with Client(server.url + path) as client:
            client.actions(request())
    with pytest.raises(InvalidStatus) as refused:
        Client(f'{server.url}/policies/other')
    assert refused.value.response.status_code == 404


def fetched(server: Running, path: str, **headers: str) -> tuple[int, str, str]:
    asked = urllib.request.Request(f'http://127.0.0.1:{server.port}{path}', headers=headers)
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        return answer.status, answer.headers['content-type'], answer.read().decode()


def test_health_is_as_openpis_servers_tell_it(server: Running) -> None:
    assert fetched(server, '/healthz')[::2] == (200, 'OK')
    assert fetched(server, '/ready')[0] == 200


def test_the_status_is_for_programs_and_for_people(server: Running) -> None:
    with Client(server.url) as client:
        client.actions(request())
        status = json.loads(fetched(server, '/status')[2])
        one = status['policies']['tiny']
        assert status['ready'] and one['connected'] == 1 and one['answers'] > 0
        assert one['total_ms']['p50'] <= one['total_ms']['p99']
        kind, page = fetched(server, '/status', Accept='text/html,*/*')[1:]
        assert kind.startswith('text/html') and one['bundle_sha256'] in page
        # What a robot comes back with is nobody else's.
        whole = client.metadata['session_id']
        assert whole[:8] in page and whole not in page and whole not in json.dumps(status)


def test_prometheus_reads_what_happened(server: Running) -> None:
    with Client(server.url) as client:
        client.actions(request())
        text = fetched(server, '/metrics')[2]
    numbers = {
        line.rpartition(' ')[0]: float(line.rpartition(' ')[2])
        for line in text.splitlines()
        if not line.startswith('#')
    }
    assert numbers['vla_answers_total{policy="tiny"}'] == server.served.statistics.answers
    assert numbers['vla_sessions{policy="tiny",state="connected"}'] >= 1
