"""Everything that a message may hold beside what fits, each refused by its key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
from policy_servers import request
from tiny_policy import tiny_spec

from vla_runtime.inference.settings import PolicySettings
from vla_runtime.remote.message_pack import MessageError, flatten
from vla_tools.serve.request_keys import RequestKeys
from vla_tools.serve.robot_request import RequestReader, RobotRequest
from vla_tools.serve.wire_images import MOST_PIXELS

IMAGE = 'observation/image/top'
PIXELS = request()[IMAGE]
JPEG = cv2.imencode('.jpg', PIXELS[:, :, ::-1])[1].tobytes()
PNG = cv2.imencode('.png', PIXELS[:, :, ::-1])[1].tobytes()


def read(family: str = 'pi05', **changes: Any) -> RobotRequest:
    spec = tiny_spec(family)
    message = {key: value for key, value in request(**changes).items() if value is not ...}
    return RequestReader(spec, RequestKeys(spec), PolicySettings()).read(flatten(message))


def test_a_request_has_what_was_sent() -> None:
    noise, plan = np.ones((8, 8), np.float32), np.zeros((4, 3))
    found = read(
        session_id='arm',
        seed=7,
        number=3,
        noise=noise,
        plan=plan,
        delay_steps=np.int64(2),
        age=0.25,
        settings={'denoise_steps': 2, 'cache_mode': 'off'},
        stamps={'top': 2**60, 'state': np.int64(5)},
        report=True,
    )
    assert found.observation is not None and found.wants_report
    assert found.observation.stamps_ns == {'top': 2**60, 'state': 5}
    assert (found.session_id, found.seed, found.number, found.delay_steps) == ('arm', 7, 3, 2)
    assert found.age_s == 0.25 and np.array_equal(found.noise, noise)
    assert np.array_equal(found.plan, plan)
    assert found.settings is not None
    assert (found.settings.denoise_steps, found.settings.cache.mode) == (2, 'off')


def test_a_reset_needs_no_observation() -> None:
    spec = tiny_spec()
    reader = RequestReader(spec, RequestKeys(spec), PolicySettings())
    assert reader.read({'endpoint': 'reset', 'seed': 5}) == RobotRequest('reset', seed=5)


@pytest.mark.parametrize('image', [PIXELS, PIXELS.transpose(2, 0, 1), PNG])
def test_images_of_every_form_are_the_same(image: Any) -> None:
    found = read(**{IMAGE: image}).observation
    assert found is not None and np.array_equal(found.images['top'], PIXELS)
    assert found.images['top'].flags.c_contiguous


def test_a_jpeg_is_what_opencv_reads() -> None:
    found = read(**{IMAGE: JPEG}).observation
    expected = cv2.imdecode(np.frombuffer(JPEG, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
    assert found is not None and np.array_equal(found.images['top'], expected)


def test_an_absent_camera_is_none() -> None:
    found = read(**{IMAGE: None}).observation
    assert found is not None and found.images['top'] is None


def png_that_claims(width: int, height: int) -> bytes:
    sizes = width.to_bytes(4, 'big') + height.to_bytes(4, 'big')
    return PNG[:16] + sizes + PNG[24:]


NAN = np.array([0.1, np.nan, 0.2])
FAULTS: list[tuple[str, dict[str, Any]]] = [
    (IMAGE, {IMAGE: ...}),
    (IMAGE, {IMAGE: PIXELS.astype(np.float32)}),
    (IMAGE, {IMAGE: PIXELS[0]}),
    (IMAGE, {IMAGE: PIXELS[:, :, :2]}),
    (IMAGE, {IMAGE: np.zeros((0, 4, 3), np.uint8)}),
    (IMAGE, {IMAGE: np.lib.stride_tricks.as_strided(PIXELS, (1, MOST_PIXELS + 1, 3), (0, 0, 0))}),
    (IMAGE, {IMAGE: PIXELS.tolist()[:1]}),
    (IMAGE, {IMAGE: 'a picture'}),
    (IMAGE, {IMAGE: b'no picture'}),
    (IMAGE, {IMAGE: b''}),
    (IMAGE, {IMAGE: JPEG[:200]}),
    (IMAGE, {IMAGE: PNG[:-20]}),
    (IMAGE, {IMAGE: png_that_claims(60_000, 60_000)}),
    ('images/top', {'images/top': PIXELS}),
    ('observation/state', {'observation/state': ...}),
    ('observation/state', {'observation/state': NAN}),
    ('observation/state', {'observation/state': np.array([0.1, np.inf, 0.2])}),
    ('observation/state', {'observation/state': np.zeros(2)}),
    ('observation/state', {'observation/state': np.zeros((3, 1))}),
    ('observation/state', {'observation/state': np.zeros(3, bool)}),
    ('observation/state', {'observation/state': ['a', 'b', 'c']}),
    ('observation/state', {'observation/state': [[1], [2, 3]]}),
    ('observation/state', {'observation/state': 'abc'}),
    ('observation/state', {'observation/state/elbow': 0.1}),
    ('observation/state', {'state': np.zeros(3)}),
    ('observation/state/elbow', {'observation/state': ..., 'observation/state/elbow': 'x'}),
    ('observation/state/shoulder', {'observation/state': ..., 'observation/state/elbow': 1.0}),
    ('prompt', {'prompt': ...}),
    ('prompt', {'prompt': '  '}),
    ('prompt', {'prompt': 7}),
    ('prompt', {'prompt': 'x' * 5000}),
    ("'promt'", {'promt': 'go'}),
    ('endpoint', {'endpoint': np.array(['infer', 'reset'])}),
    ('endpoint', {'endpoint': [['infer']]}),
    ("'observation/image", {'endpoint': 'reset'}),
    ('settings/', {'settings': {'denoise_step': 1}}),
    ('settings', {'settings': {'denoise_steps': 'many'}}),
    ('settings', {'settings': {'seed': 2**70}}),
    ('settings', {'settings': {'cfg_beta': float('nan')}}),
    ('endpoint', {'endpoint': 'kill'}),
    ('session_id', {'session_id': ''}),
    ('session_id', {'session_id': 'x' * 200}),
    ('session_id', {'session_id': 'a\nb'}),
    ('session_id', {'session_id': 5}),
    ('seed', {'seed': -1}),
    ('seed', {'seed': 1.0}),
    ('seed', {'seed': True}),
    ('seed', {'seed': 2**64}),
    ('number', {'number': 'one'}),
    ('noise', {'noise': np.full((8, 8), np.nan)}),
    ('noise', {'noise': 'noise'}),
    ('plan', {'plan': np.zeros((0, 3))}),
    ('plan', {'plan': np.zeros((5000, 3))}),
    ('plan', {'plan': np.full((2, 3), np.inf)}),
    ('plan', {'plan': np.zeros((2, 3)), 'executed_steps': 1}),
    ('executed_steps', {'executed_steps': 9}),
    ('delay_steps', {'delay_steps': -1}),
    ('age', {'age': -0.1}),
    ('age', {'age': float('nan')}),
    ('age', {'age': 'old'}),
    ('report', {'report': 1}),
    ('stamps/top', {'stamps': {'top': -1}}),
    ('stamps/top', {'stamps': {'top': 'now'}}),
    ("'stamps/foo'", {'stamps': {'foo': 1}}),
    ('noise', {'noise': np.full((8, 8), 1e300)}),
    ('seed', {'seed': 1, 'settings': {'seed': 2}}),
    ('settings/pipeline', {'settings': {'pipeline': 'throughput'}}),
    ("'executed_step': no field of a request; did you mean 'executed_steps'", {'executed_step': 1}),
]


@pytest.mark.parametrize('turn', range(len(FAULTS)))
def test_what_does_not_fit_is_refused_by_its_key(turn: int) -> None:
    key, changes = FAULTS[turn]
    with pytest.raises(MessageError) as refused:
        read(**changes)
    assert str(refused.value).startswith(key), str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_policy_of_one_pass_continues_no_plan() -> None:
    with pytest.raises(MessageError, match='plan'):
        read('act', prompt='', plan=np.zeros((2, 3)))


def test_big_endian_numbers_are_read() -> None:
    state = np.array([0.5, -0.25, 1.0])
    found = read(**{'observation/state': state.astype('>f4')}).observation
    assert found is not None and found.state.tolist() == state.tolist()
    assert found.state.dtype.isnative


def test_a_policy_with_a_history_takes_earlier_states() -> None:
    earlier = np.zeros((2, 3))
    found = read(**{'observation/earlier_states': earlier}).observation
    assert found is not None and len(found.earlier_states) == 2


def test_a_state_that_no_policy_has_is_empty() -> None:
    spec = replace(tiny_spec(), state=())
    message = request()
    del message['observation/state']
    found = RequestReader(spec, RequestKeys(spec), PolicySettings()).read(message)
    assert found.observation is not None and found.observation.state.shape == (0,)
