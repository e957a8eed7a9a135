"""Keys of openpi's robots and of a file, against the cameras and the state of a bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import blocks
from paths import ROOT
from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import BundleSpec, CameraSpec, StateSpec
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.remote.message_pack import MessageError, flatten, unpack
from vla_tools.serve.request_keys import KeysFile, RequestKeys, read_key_mapping
from vla_tools.serve.robot_request import RequestReader, RobotRequest

GOLDEN = ROOT / 'test' / 'golden' / 'openpi_wire'


def spec_of(cameras: tuple[str, ...], states: int, absent: tuple[str, ...] = ()) -> BundleSpec:
    return replace(
        tiny_spec(),
        cameras=tuple(CameraSpec(name, name not in absent) for name in (*cameras, *absent)),
        state=tuple(StateSpec(f's{i}', 'rad') for i in range(states)),
    )


def read(spec: BundleSpec, message: dict[str, Any], file: KeysFile | None = None) -> RobotRequest:
    reader = RequestReader(spec, RequestKeys(spec, file), PolicySettings())
    return reader.read(flatten(message))


def golden(name: str) -> dict[str, Any]:
    return unpack((GOLDEN / f'request_{name}.msgpack').read_bytes())


ROBOTS = {
    'droid': (
        ('exterior_image_1_left', 'wrist_image_left'),
        ('base_0_rgb', 'left_wrist_0_rgb'),
        8,
        (36, 64),
    ),
    'libero': (('image', 'wrist_image'), ('base_0_rgb', 'left_wrist_0_rgb'), 8, (32, 32)),
    'aloha': (
        ('cam_high', 'cam_left_wrist'),
        ('base_0_rgb', 'left_wrist_0_rgb'),
        14,
        (24, 32),
    ),
}


@pytest.mark.parametrize('of_openpi', [False, True])
@pytest.mark.parametrize('robot', ROBOTS)
def test_requests_of_openpis_robots_fit_by_name(robot: str, of_openpi: bool) -> None:
    own, openpis, states, size = ROBOTS[robot]
    cameras, absent = (openpis, ('right_wrist_0_rgb',)) if of_openpi else (own, ())
    found = read(spec_of(cameras, states, absent), golden(robot)).observation
    assert found is not None
    assert [found.images[name].shape for name in cameras] == [(*size, 3)] * 2
    assert found.images.keys() == {*cameras}
    assert found.state.tolist() == [-1 + i / 4 for i in range(states - 1)] + [
        0.5 if robot == 'droid' else -1 + (states - 1) / 4
    ]
    assert found.instruction == golden(robot)['prompt']


@pytest.mark.parametrize('robot', ROBOTS)
def test_a_camera_that_the_policy_lacks_is_refused_by_its_key(robot: str) -> None:
    with pytest.raises(MessageError) as refused:
        read(spec_of(('front', 'side'), ROBOTS[robot][2]), golden(robot))
    key = next(key for key in flatten(golden(robot)) if 'image' in key)
    assert str(refused.value).startswith(f'{key}:') and 'front, side' in str(refused.value)


@pytest.mark.parametrize(
    ('robot', 'field'),
    [
        ('droid', 'observation/joint_position + observation/gripper_position'),
        ('libero', 'observation/state'),
        ('aloha', 'state'),
    ],
)
def test_a_state_of_another_length_is_refused_by_its_key(robot: str, field: str) -> None:
    with pytest.raises(MessageError) as refused:
        read(spec_of(ROBOTS[robot][0], 5), golden(robot))
    assert str(refused.value).startswith(f'{field}:')


def test_a_part_of_a_state_alone_is_refused() -> None:
    message = golden('droid')
    del message['observation/gripper_position']
    with pytest.raises(MessageError, match='gripper_position'):
        read(spec_of(ROBOTS['droid'][0], 8), message)


def test_a_file_maps_other_keys(tmp_path: Path) -> None:
    path = tmp_path / 'keys.yaml'
    path.write_text(
        'images: {observation/exterior_image_1_left: front, eye: hand}\n'
        'state: [observation/gripper_position, observation/joint_position]\n'
        'instruction: task\n'
        'ignore: [prompt]\n'
    )
    message = golden('droid')
    message['eye'] = message.pop('observation/wrist_image_left')
    found = read(spec_of(('front', 'hand'), 8), {**message, 'task': 'go'}, read_key_mapping(path))
    assert found.observation is not None
    assert found.observation.images.keys() == {'front', 'hand'}
    assert found.observation.state[:2].tolist() == [0.5, -1.0]
    assert found.observation.instruction == 'go'


KEYS_OF_THE_PAGE = next(text for text in blocks('docs/howto/serve.md', 'yaml') if 'ignore' in text)


def test_keys_of_a_file_go_beside_the_usual_ones(tmp_path: Path) -> None:
    path = tmp_path / 'keys.yaml'
    path.write_text(KEYS_OF_THE_PAGE)
    file, spec = read_key_mapping(path), spec_of(('front', 'wrist'), 8)
    mapped = read(spec, {**golden('droid'), 'observation/timestamp': 3}, file)
    assert mapped.observation is not None
    images = {
        f'observation/image/{name}': mapped.observation.images[name] for name in ('front', 'wrist')
    }
    own = {**images, 'observation/state': mapped.observation.state, 'prompt': 'go'}
    found = read(spec, own, file).observation
    assert found is not None and np.array_equal(found.state, mapped.observation.state)
    for twice in ('observation/joint_position', 'instruction', 'state'):
        with pytest.raises(MessageError, match=twice):
            read(spec, {**own, twice: 'go' if twice == 'instruction' else np.zeros(7)}, file)


def test_a_usual_key_that_is_ignored_is_not_read(tmp_path: Path) -> None:
    file = KeysFile(state=('joints',), instruction='task', ignore=('observation/state', 'prompt'))
    message = {'images': {'top': np.zeros((4, 4, 3), np.uint8)}, 'joints': np.zeros(3)}
    message |= {'task': 'go', 'prompt': 7, 'observation/state': 'none'}
    found = read(spec_of(('top',), 3), message, file).observation
    assert found is not None and found.instruction == 'go' and not found.state.any()


def test_a_camera_whose_key_is_ignored_has_no_second_image() -> None:
    file = KeysFile(ignore=('images/top',))
    pixels = np.zeros((4, 4, 3), np.uint8)
    message = {'images': {'top': pixels}, 'observation/image/top': pixels, 'prompt': 'go'}
    found = read(spec_of(('top',), 3), {**message, 'observation/state': np.zeros(3)}, file)
    assert found.observation is not None and [*found.observation.images] == ['top']


@pytest.mark.parametrize(
    'text',
    [
        *('images: [a]', 'imagse: {}', 'images: {a: nowhere}', '{', 'x'),
        *('ignore: [seed]', 'images: {plan: top}', 'ignore: [settings/seed]', 'state: [noise]'),
    ],
)
def test_a_file_that_does_not_fit_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / 'keys.yaml'
    path.write_text(text)
    with pytest.raises(ValueError):
        RequestKeys(tiny_spec(), read_key_mapping(path))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'keys\.yaml'):
        read_key_mapping(tmp_path / 'keys.yaml')


def test_a_state_by_names_is_put_in_order() -> None:
    spec = spec_of(('top',), 3)
    image = np.zeros((4, 4, 3), np.uint8)
    message = {
        'observation': {
            'image': {'top': image},
            'state': {'s2': np.float32(0.5), 's0': np.array([1.0]), 's1': 2},
        },
        'prompt': 'go',
    }
    found = read(spec, message).observation
    assert found is not None and found.state.tolist() == [1.0, 2.0, 0.5]
