"""A policy on a server gives the chunks that it gives here, and says why where it gives none."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from mutations import COUNTS, fuzz, mutated
from paths import ROOT
from served_process import ServedProcess
from tiny_policy import history_spec, observation, tiny_spec, write_tiny_policy
from websockets.sync.server import ServerConnection, serve

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.success import spec_identity
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.messages.jpeg import through_jpeg
from vla_runtime.policy import Policy
from vla_runtime.remote.connection import (
    ServerAddress,
    ServerLostError,
    ServerRefusalError,
    read_server_key,
)
from vla_runtime.remote.contract import ContractError, contract_of, read_contract
from vla_runtime.remote.link import fetch_contract
from vla_runtime.remote.message_pack import MessageError, pack, unpack
from vla_runtime.remote.policy import RemotePolicy
from vla_runtime.remote.report_fields import WrongAnswerError, answer_of, fields_of
from vla_runtime.types import CommittedPlan, Observation

SETTINGS = PolicySettings(denoise_steps=3)
KEY = 'a-key-of-thirty-two-characters..'
# For a condition that comes true at once on an idle machine.
PATIENCE_S = 60.0


def wait_for(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, 'waited in vain'
        time.sleep(0.005)


def address(url: str, timeout_s: float = PATIENCE_S, **others: Any) -> ServerAddress:
    return ServerAddress(url, timeout_s, **others)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = tiny_spec(advantage='task_newline', delta=True)
    return write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'tiny', spec)


@pytest.fixture(scope='module')
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that sees frames and states of earlier steps."""
    return write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'history', history_spec())


@pytest.fixture(scope='module')
def server(bundle: Path, history: Path) -> Iterator[ServedProcess]:
    """A server that no test ends."""
    process = ServedProcess(bundle, str(history))
    yield process
    process.kill()


@pytest.fixture(scope='module')
def local(bundle: Path) -> Iterator[Policy]:
    policy = Policy.load(bundle, 'torch', threads=1)
    yield policy
    policy.close()


@contextmanager
def remote(
    url: str,
    timeout_s: float = PATIENCE_S,
    key: str = '',
    ca_file: Path | None = None,
    **others: Any,
) -> Iterator[RemotePolicy]:
    where = address(url, timeout_s, key=key, ca_file=ca_file)
    policy = RemotePolicy(where, SETTINGS, **others)
    try:
        yield policy
    finally:
        policy.close()


def stamped(seed: int, **changes: Any) -> Observation:
    stamps = dict.fromkeys(('top', 'wrist', 'state'), 10**18 + seed * 10**8)
    return observation(seed, stamps_ns=stamps, **changes)


def plan(rows: int = 6) -> CommittedPlan:
    actions = np.random.default_rng(5).uniform(-0.1, 0.1, (rows, 3))
    return CommittedPlan(actions, 2, rows)


GUIDED = replace(SETTINGS, cfg_beta=2.0, seed=7)
TIED = replace(SETTINGS, rtc_mode='guided')
BOUNDED = replace(SETTINGS, cache=CachePolicy('bounded', 10.0, 3, 255.0, 256))


@pytest.mark.parametrize(
    ('settings', 'given'),
    [
        (SETTINGS, {}),
        (GUIDED, {}),
        (TIED, {'plan': plan()}),
        (replace(SETTINGS, rtc_mode='hard_prefix'), {'plan': plan(3)}),
        (SETTINGS, {'plan': plan()}),
        (BOUNDED, {}),
        (SETTINGS, {'number': 41}),
    ],
)
def test_chunks_and_reports_are_those_of_the_policy_here(
    server: ServedProcess, local: Policy, settings: PolicySettings, given: dict[str, Any]
) -> None:
    local.reset()
    with remote(server.url) as policy:
        for seed in (1, 1, 2):
            chunk, report = policy.infer(stamped(seed), settings=settings, **given)
            expected, here = local.infer(stamped(seed), settings=settings, **given)
            assert np.array_equal(chunk.actions, expected.actions)
            assert np.array_equal(chunk.normalised, expected.normalised)
            assert np.array_equal(report.noise, here.noise)
            assert (chunk.names, chunk.kinds) == (expected.names, expected.kinds)
            assert chunk.step_time_s == expected.step_time_s
            assert repr(report.cache) == repr(here.cache)
            same = ('number', 'seed', 'beta', 'guidance', 'rtc_mode', 'tokens', 'runs', 'stamps_ns')
            assert all(getattr(report, name) == getattr(here, name) for name in same)
            assert report.milliseconds['total'] >= report.milliseconds['network'] > 0.0


@pytest.mark.parametrize('ahead_s', [-10, 10])
def test_the_robots_clock_may_be_another_than_the_servers(
    server: ServedProcess, local: Policy, ahead_s: int
) -> None:
    local.reset()
    stamp_ns = time.time_ns() + ahead_s * 10**9
    seen = observation(1, stamps_ns=dict.fromkeys(('top', 'wrist', 'state'), stamp_ns))
    later = replace(seen, stamps_ns={name: ns + 10**8 for name, ns in seen.stamps_ns.items()})
    with remote(server.url) as policy:
        for one in (seen, later):
            chunk, report = policy.infer(one, settings=BOUNDED)
            expected, here = local.infer(one, settings=BOUNDED)
            assert np.array_equal(chunk.actions, expected.actions)
            assert report.stamps_ns == one.stamps_ns
            assert repr(report.cache) == repr(here.cache)


def test_a_reset_begins_with_number_0_and_an_empty_cache(
    server: ServedProcess, local: Policy
) -> None:
    with remote(server.url) as policy:
        for _ in range(2):
            policy.reset()
            local.reset()
            for _ in range(2):
                chunk, report = policy.infer(stamped(3))
                expected, here = local.infer(stamped(3), settings=SETTINGS)
                assert np.array_equal(chunk.actions, expected.actions)
                assert report.number == here.number
                assert report.cache.prefixes[0].reuse == here.cache.prefixes[0].reuse


def test_states_of_earlier_steps_go_along(server: ServedProcess, history: Path) -> None:
    spec, random = read_bundle(history).spec, np.random.default_rng(1)
    seen = observation(
        1,
        images={
            camera.name: random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
            for camera in spec.cameras
        },
        earlier_states=(random.uniform(-1, 1, len(spec.state)),),
    )
    here = Policy.load(history, 'torch', threads=1)
    with remote(f'{server.url}/policies/history') as policy:
        chunk, _ = policy.infer(seen, settings=PolicySettings())
    assert np.array_equal(chunk.actions, here.infer(seen)[0].actions)
    here.close()


def test_with_jpeg_the_policy_sees_the_images_after_it(
    server: ServedProcess, local: Policy
) -> None:
    seen = stamped(4)
    images = {name: through_jpeg(image, 80) for name, image in seen.images.items()}
    local.reset()
    with remote(server.url, jpeg_quality=80) as policy:
        chunk, _ = policy.infer(seen, settings=SETTINGS)
    expected, _ = local.infer(replace(seen, images=images), settings=SETTINGS)
    assert np.array_equal(chunk.actions, expected.actions)
    raw, _ = local.infer(seen, settings=SETTINGS, number=0)
    assert not np.array_equal(chunk.actions, raw.actions)


def test_the_contract_is_the_bundle(server: ServedProcess, bundle: Path) -> None:
    read, contract = read_bundle(bundle), fetch_contract(address(server.url))
    assert contract.spec == read.spec
    assert contract.bundle_sha256 == spec_identity(read.spec)
    assert {*contract.statistics} == {*read.statistics}
    assert all(np.array_equal(contract.statistics[k], v) for k, v in read.statistics.items())
    assert (contract.backend, contract.device, contract.threads) == ('torch', 'cpu', 1)


@pytest.mark.parametrize(
    ('settings', 'names'),
    [
        ({'pipeline': 'throughput'}, 'pipeline'),
        ({'pipeline': 'packed'}, 'pipeline'),
        ({'rtc_mode': 'frozen'}, 'frozen'),
        ({'noise_scheduler': 'ddim'}, 'noise_scheduler'),
    ],
)
def test_a_setting_without_a_meaning_is_refused_by_name(
    server: ServedProcess, settings: dict[str, Any], names: str
) -> None:
    with remote(server.url) as policy:
        with pytest.raises(ValueError, match=names):
            policy.check(replace(SETTINGS, **settings))
        policy.check(GUIDED)


def test_what_the_policy_refuses_is_said_and_changes_nothing(
    server: ServedProcess, local: Policy
) -> None:
    local.reset()
    with remote(server.url) as policy:
        with pytest.raises(ServerRefusalError) as refused:
            policy.infer(stamped(1, state=np.zeros(2)))
        assert 'observation/state' in refused.value.reason
        chunk, report = policy.infer(stamped(1))
        assert (report.number, policy.reconnects) == (0, 0)
    assert np.array_equal(chunk.actions, local.infer(stamped(1), settings=SETTINGS)[0].actions)


# --- Keys and certificates


@pytest.mark.parametrize('text', ['', '# none\n', 'schlüssel\n'])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / 'key'
    file.write_text(text, encoding='utf-8')
    with pytest.raises(ValueError, match='server_key_file'):
        read_server_key(file)


def test_key_and_certificate_are_checked(bundle: Path, tmp_path: Path) -> None:
    certificate, private, file = (tmp_path / name for name in ('c.pem', 'k.pem', 'key'))
    file.write_text(f'# of the arm\n{KEY}\n', encoding='utf-8')
    words = ['req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days', '2', '-subj', '/CN=box']
    words += ['-addext', 'subjectAltName=IP:127.0.0.1']
    try:
        subprocess.run(
            ['openssl', *words, '-keyout', str(private), '-out', str(certificate)],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip('openssl is not here')
    options = {'--tls-cert': certificate, '--tls-key': private, '--key-file': file}
    server = ServedProcess(bundle, *(str(word) for pair in options.items() for word in pair))
    url = server.url.replace('ws:', 'wss:')
    try:
        with pytest.raises(ValueError, match='server_ca_file'):
            fetch_contract(address(url, key=KEY))
        for key in ('', 'another-key-of-many-characters..'):
            with pytest.raises(ValueError, match='server_key_file'):
                fetch_contract(address(url, key=key, ca_file=certificate))
        found = fetch_contract(address(url, key=read_server_key(file), ca_file=certificate))
        assert found.backend == 'torch'
        # A server that stands still takes no bytes of an encrypted frame either.
        with remote(url, 1.0, key=KEY, ca_file=certificate) as policy:
            gives_up_in_time(server, policy)
    finally:
        server.kill()


@pytest.mark.parametrize(
    'url',
    [
        *('box:8000', 'http://box', 'ws://', 'ws://box:port', 'ws://box:0', 'ws://box/#x'),
        f'ws://{"b" * 70}:8000',
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match='server'):
        ServerAddress(url)


@pytest.mark.parametrize('name', ['msgpack', 'websockets'])
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=name):
        fetch_contract(address('ws://127.0.0.1:9'))


def test_a_key_is_in_no_message() -> None:
    assert KEY not in repr(ServerAddress('ws://box', key=KEY))


# --- A server that is away


def test_nobody_there_is_said_with_the_address() -> None:
    with socket.create_server(('127.0.0.1', 0)) as taken:
        url = f'ws://127.0.0.1:{taken.getsockname()[1]}'
    with pytest.raises(ServerLostError, match=url):
        fetch_contract(address(url))


def test_a_killed_server_is_found_again_and_one_with_another_bundle_refused(
    bundle: Path, local: Policy, tmp_path: Path
) -> None:
    other = write_tiny_policy(tmp_path / 'other', tiny_spec())
    notes: list[str] = []
    server = ServedProcess(bundle)
    with remote(server.url, note=notes.append) as policy:
        policy.infer(stamped(1))
        server.kill()
        with pytest.raises(ServerLostError):
            policy.infer(stamped(2))
        assert policy.why_away
        server.start(other)
        hashes = [spec_identity(read_bundle(one).spec)[:12] for one in (bundle, other)]
        wait_for(lambda: all(one in policy.why_away for one in hashes))
        with pytest.raises(ServerLostError):
            policy.infer(stamped(2))
        server.kill()
        server.start(bundle)
        wait_for(lambda: not policy.why_away)
        chunk, report = policy.infer(stamped(2))
        expected, _ = local.infer(stamped(2), settings=SETTINGS, number=1)
        assert np.array_equal(chunk.actions, expected.actions)
        assert (report.number, policy.reconnects) == (1, 1)
        assert len(notes) >= 3
    server.kill()


def test_a_server_that_stands_still_is_given_up_in_time_and_found_again(
    server: ServedProcess,
) -> None:
    with remote(server.url, timeout_s=1.0) as policy:
        gives_up_in_time(server, policy)
        wait_for(lambda: answers(policy, 3))
        assert policy.reconnects


def gives_up_in_time(server: ServedProcess, policy: RemotePolicy) -> None:
    """A request to a server that stands still ends, for want of room on the way too."""
    wait_for(lambda: answers(policy, 1))
    server.send(signal.SIGSTOP)
    begin_s = time.monotonic()
    # A large frame fills the buffers on the way.
    large = {name: np.zeros((2000, 2000, 3), np.uint8) for name in ('top', 'wrist')}
    try:
        with pytest.raises(ServerLostError):
            policy.infer(replace(stamped(2), images=large))
    finally:
        server.send(signal.SIGCONT)
    assert time.monotonic() - begin_s < 10.0


def answers(policy: RemotePolicy, seed: int) -> bool:
    """Whether an inference comes back; on a busy machine one may take longer than its time."""
    try:
        policy.infer(stamped(seed))
    except (ServerLostError, ServerRefusalError):
        return False
    return True


# --- Wrong answers


@pytest.fixture(scope='module')
def told(bundle: Path, local: Policy) -> dict[str, Any]:
    """The contract of the bundle."""
    return contract_of(local, read_bundle(bundle).statistics, 'cpu', ['tiny'])


@contextmanager
def answering(
    told: dict[str, Any], answer: Callable[[ServerConnection, Any], None]
) -> Iterator[str]:
    """A server of the test's own, which tells a contract and answers as it likes; its URL."""

    def speak(connection: ServerConnection) -> None:
        connection.send(pack({**told, 'session_id': 'one'}))
        for message in connection:
            answer(connection, unpack(message))

    with serve(speak, '127.0.0.1', 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f'ws://127.0.0.1:{server.socket.getsockname()[1]}'
        finally:
            server.shutdown()
            thread.join()


def good_reply(local: Policy, number: int = 0) -> dict[str, Any]:
    chunk, report = local.infer(stamped(1), settings=SETTINGS, number=number)
    fields = fields_of(chunk, report, spec_identity(local.spec))
    return {'actions': chunk.actions, 'report': fields}


def changed(reply: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**reply, 'report': {**reply['report'], **fields}}


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    'shape': lambda reply: {**reply, 'actions': reply['actions'][:-1]},
    'integers': lambda reply: {**reply, 'actions': reply['actions'].astype(np.int32)},
    'not finite': lambda reply: {**reply, 'actions': np.full_like(reply['actions'], np.nan)},
    'no actions': lambda reply: {'report': reply['report']},
    'no report': lambda reply: {'actions': reply['actions']},
    'a list': lambda reply: [1, 2],
    'other names': lambda reply: changed(reply, names=['a', 'b', 'c']),
    'another bundle': lambda reply: changed(reply, bundle_sha256='0' * 64),
    'another number': lambda reply: changed(reply, number=9),
    'a text for a number': lambda reply: changed(reply, number='0'),
    'no such outcome': lambda reply: changed(reply, prefixes=[{'reuse': 'maybe'}]),
    'no milliseconds': lambda reply: changed(reply, milliseconds=None),
}


@pytest.mark.parametrize('what', WRONG)
def test_a_wrong_answer_is_refused_and_the_next_is_taken(
    told: dict[str, Any], local: Policy, what: str
) -> None:
    replies = [WRONG[what](good_reply(local)), good_reply(local)]

    def answer(connection: ServerConnection, _: Any) -> None:
        connection.send(pack(replies.pop(0)))

    with answering(told, answer) as url, remote(url) as policy:
        with pytest.raises(WrongAnswerError):
            policy.infer(stamped(1))
        wait_for(lambda: not policy.why_away)
        policy.infer(stamped(1))


@pytest.mark.parametrize(
    'break_off',
    [
        lambda one: one.send(pack(['x' * 99])[:40]),
        lambda one: one.socket.sendall(b'\x82\x7e\x40\x00half a frame'),
        lambda one: one.socket.shutdown(socket.SHUT_RDWR),
        lambda one: one.close(1011, 'out of memory'),
        lambda one: None,
    ],
    ids=['no MessagePack', 'half a frame', 'cut', 'closed', 'silent'],
)
def test_a_broken_answer_ends_the_connection_in_time(
    told: dict[str, Any], local: Policy, break_off: Callable[[ServerConnection], None]
) -> None:
    asked = []

    def answer(connection: ServerConnection, request: Any) -> None:
        asked.append(request)
        if len(asked) == 1:
            break_off(connection)
        else:
            connection.send(pack(good_reply(local)))

    with answering(told, answer) as url, remote(url, timeout_s=3.0) as policy:
        with pytest.raises(ServerLostError):
            policy.infer(stamped(1))
        wait_for(lambda: not policy.why_away)
        wait_for(lambda: answers(policy, 1))
        assert policy.reconnects >= 1


def test_a_session_that_still_has_its_dead_connection_is_left_for_a_new_one(
    told: dict[str, Any], local: Policy
) -> None:
    sessions = []

    def answer(connection: ServerConnection, request: Any) -> None:
        sessions.append(request['session_id'])
        if len(sessions) == 1:
            connection.send('session_id: this session has a connection already')
            connection.close(1008, 'session_id')
        else:
            connection.send(pack(good_reply(local)))

    with answering(told, answer) as url, remote(url) as policy:
        with pytest.raises(ServerRefusalError):
            policy.infer(stamped(1))
        wait_for(lambda: not policy.why_away)
        policy.infer(stamped(1))
        assert policy.session_id == 'one'


@pytest.mark.parametrize(
    'change',
    [
        {'server': 'another'},
        {'protocol': 2},
        {'protocol': None},
        {'bundle_sha256': '0' * 64},
        {'bundle': {'policy_yaml': 'format: 1', 'statistics': {}}},
        {'bundle': None},
        {'runs': {}},
    ],
)
def test_a_contract_that_is_none_is_refused(told: dict[str, Any], change: dict[str, Any]) -> None:
    assert read_contract(unpack(pack(told))).bundle_sha256 == told['bundle_sha256']
    with pytest.raises(ContractError):
        read_contract({**told, **change})


@pytest.mark.parametrize('count', COUNTS)
def test_mutated_contracts_and_answers_are_read_or_refused(
    told: dict[str, Any], local: Policy, count: int
) -> None:
    contract, reply = pack(told), pack(good_reply(local))
    spec, identity = local.spec, told['bundle_sha256']

    def one(random: Random) -> None:
        if random.random() < 0.5:
            read_contract(unpack(mutated(contract, random)))
            return
        answer = unpack(mutated(reply, random))
        if not isinstance(answer, dict):
            raise MessageError('no map')
        actions = answer.get('actions')
        chunk, _ = answer_of(actions, answer.get('report'), spec, identity, {})
        assert np.isfinite(chunk.actions).all() and chunk.names == spec.action_names

    accepted, refused = fuzz(count, 'remote', one, (ContractError, MessageError, WrongAnswerError))
    assert accepted and refused


def test_statistics_that_do_not_fit_are_refused(told: dict[str, Any]) -> None:
    statistics = {**told['bundle']['statistics'], 'state.q01': np.full(3, np.nan)}
    bundle = {**told['bundle'], 'statistics': statistics}
    with pytest.raises(ContractError, match='statistics'):
        read_contract({**told, 'bundle': bundle})


def test_neither_torch_nor_a_runtime_is_loaded(server: ServedProcess) -> None:
    source = (
        'import sys\n'
        "for name in ('torch', 'onnxruntime', 'tensorrt', 'transformers'):\n"
        '    sys.modules[name] = None\n'
        'import numpy as np\n'
        'from vla_runtime.remote.connection import ServerAddress\n'
        'from vla_runtime.remote.policy import RemotePolicy\n'
        'from vla_runtime.types import Observation\n'
        f'policy = RemotePolicy(ServerAddress({server.url!r}, 60.0))\n'
        'image = np.zeros((48, 64, 3), np.uint8)\n'
        "seen = Observation({'top': image, 'wrist': image}, np.zeros(3), 'lift it')\n"
        'print(policy.infer(seen)[0].actions.shape)\n'
        'policy.close()\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', source], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, '(8, 3)\n'), done.stderr
