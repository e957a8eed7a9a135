"""openpi's MessagePack, both ways, and what is refused."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest
from mutations import COUNTS, fuzz, mutated
from paths import ROOT

from vla_runtime.remote.message_pack import MessageError, flatten, pack, unpack

GOLDEN = ROOT / 'test' / 'golden' / 'openpi_wire'
WIRE = json.loads((GOLDEN / 'wire.json').read_text())
FILES = sorted(path.stem for path in GOLDEN.glob('*.msgpack'))
ODD = 'request_odd'


def packed(name: str) -> bytes:
    return (GOLDEN / f'{name}.msgpack').read_bytes()


def listed(value: Any) -> Any:
    """A message as the golden file lists it, arrays by type, shape and values."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {'dtype': value.dtype.str, 'shape': list(value.shape), 'values': value.tolist()}
    if isinstance(value, np.generic):
        return {'dtype': value.dtype.str, 'value': value.item()}
    if isinstance(value, bytes):
        return {'bytes_hex': value.hex()}
    return list(value) if isinstance(value, tuple) else value


def expected(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = value.get('ndarray') or value.get('npgeneric')
    return inner or {key: expected(item) for key, item in value.items()}


@pytest.mark.parametrize('name', FILES)
def test_what_the_client_packs_is_read_and_packed_again_to_the_same_bytes(name: str) -> None:
    assert pack(unpack(packed(name))) == packed(name)


@pytest.mark.parametrize('name', [ODD, 'reply_droid', 'reply_libero_with_previous', 'metadata'])
def test_values_are_those_that_were_packed(name: str) -> None:
    facts = WIRE[name]
    assert listed(unpack(packed(name))) == expected(facts.get('decodes_to', facts['packed_from']))


@pytest.mark.parametrize(
    ('name', 'key', 'channels_first'),
    [
        ('request_droid', 'observation/wrist_image_left', False),
        ('request_libero', 'observation/image', False),
        ('request_aloha', 'images/cam_high', True),
    ],
)
def test_images_have_their_pixels(name: str, key: str, channels_first: bool) -> None:
    image = flatten(unpack(packed(name)))[key]
    image = image.transpose(1, 2, 0) if channels_first else image
    y, x, c = np.indices(image.shape)
    first = int(image[0, 0, 0])
    assert np.array_equal(image, (7 * y + 13 * x + 29 * c + first) % 256)
    assert not image.flags.writeable


def test_arrays_with_keys_in_text_are_read() -> None:
    array = {'__ndarray__': True, 'data': b'\1\2', 'dtype': '|u1', 'shape': [2]}
    assert unpack(msgpack.packb({'a': array}))['a'].tolist() == [1, 2]


@pytest.mark.parametrize('value', [object(), 1j, np.array([None]), np.zeros(1, 'V4'), {1}])
def test_what_has_no_form_is_not_packed(value: Any) -> None:
    with pytest.raises(TypeError):
        pack({'a': value})


def array_of(**changes: Any) -> bytes:
    fields = {b'__ndarray__': True, b'data': b'\0' * 8, b'dtype': '<f4', b'shape': [2]}
    return msgpack.packb(fields | {key.encode(): value for key, value in changes.items()})


BAD = {
    'nothing': b'',
    'half a message': packed('request_droid')[:999],
    'two messages': b'\x80\x80',
    'an extension': msgpack.packb(msgpack.ExtType(5, b'x')),
    'a time': msgpack.packb(msgpack.Timestamp(1, 0)),
    'a key that is a number': msgpack.packb({1: 2}),
    'deep lists': b'\x91' * 5000 + b'\xc0',
    'many maps': b'\xdd\x00\x01\x00\x00' + b'\x80' * 0x10000,
    'a list that claims to be long': b'\xdd\xff\xff\xff\xff',
    'bytes that claim to be long': b'\xc6\xff\xff\xff\xff',
    'a dtype of objects': array_of(dtype='|O'),
    'a dtype of records': array_of(dtype='f4,f4'),
    'a dtype of times': array_of(dtype='<M8[s]'),
    'a dtype that is a list': array_of(dtype=[['a', 'f4']]),
    'texts without letters': array_of(dtype='<U0', data=b'', shape=[2**31 - 1]),
    'a size that begins with zero': array_of(dtype='<f04'),
    'numberless rows': array_of(data=b'', shape=[2**31 - 1, 0]),
    'an unknown size of float': array_of(dtype='<f3'),
    'too few bytes': array_of(shape=[3]),
    'a negative size': array_of(shape=[-2]),
    'a huge size': array_of(shape=[2**40, 0]),
    'sizes that overflow': array_of(shape=[2**31 - 1] * 8),
    'a size that is true': array_of(shape=[True, 2]),
    'many axes': array_of(shape=[1] * 9 + [2]),
    'no shape': array_of(shape=None),
    'data in text': array_of(data='\0' * 8),
    'a scalar of bytes': msgpack.packb({b'__npgeneric__': 1, b'data': b'x', b'dtype': '<f4'}),
    'a scalar that is too large': msgpack.packb(
        {b'__npgeneric__': 1, b'data': 300, b'dtype': '|u1'}
    ),
}


@pytest.mark.parametrize('name', BAD)
def test_no_message_is_refused(name: str) -> None:
    with pytest.raises(MessageError):
        unpack(BAD[name])


@pytest.mark.parametrize(
    'message',
    [
        [1],
        None,
        {b'a': 1},
        {'a/b': 1, 'a': {'b': 2}},
        {'a': {'a': {'a': {'a': {'a': {'a': {'a': {'a': {'a': 1}}}}}}}}},
    ],
)
def test_a_map_that_is_no_request_is_refused(message: Any) -> None:
    with pytest.raises(MessageError):
        flatten(message)


def test_flat_and_nested_keys_are_the_same() -> None:
    assert flatten({'a': {'b': 1}, 'c': 2}) == flatten({'a/b': 1, 'c': 2})


@pytest.mark.parametrize('count', COUNTS)
def test_mutated_messages_are_read_or_refused(count: int) -> None:
    messages = [packed(name) for name in FILES]

    def one(random: Random) -> None:
        flatten(unpack(mutated(random.choice(messages), random)))

    accepted, refused = fuzz(count, 'openpi', one, MessageError)
    assert accepted and refused
