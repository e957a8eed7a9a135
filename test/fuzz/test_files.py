"""Bundles and robot files with anything in them: the package's own errors, quickly and small."""

import json
import math
import shutil
import struct
import zipfile
from collections import OrderedDict
from random import Random

import numpy as np
import pytest
import torch
from mutations import COUNTS, fuzz, mutated
from paths import ROOT
from tiny_policy import TOKENIZER, tiny_spec
from written_bundle import write_bundle

from vla_convert.checkpoints.tensors import CheckpointError, read_tensors
from vla_convert.checkpoints.torch_archives import read_archive
from vla_runtime.bundle.folder import BundleError, read_bundle
from vla_runtime.bundle.tensors import read_header
from vla_runtime.files.safetensors_reader import SafetensorsReader
from vla_runtime.robot.file import RobotError, load_robot

ROBOTS = ROOT / 'config' / 'robots'
URDF = b"""<robot name="r"><joint name="shoulder_pan" type="revolute">
<limit lower="-1.5" upper="1.5" velocity="2.0" effort="1"/></joint>
<joint name="gripper" type="prismatic"><limit lower="0" upper="0.1" velocity="1"/></joint></robot>
"""
KINDS = [*b'"I32" "F64" "F16" "BF16" "BOOL" "F8_E4M3" "X" null [] {} -1'.split(), b'9' * 5000]
# Bits of a number, by the format's names.
DTYPES = {
    **dict.fromkeys(('F4',), 4),
    **dict.fromkeys(('F6_E2M3', 'F6_E3M2'), 6),
    **dict.fromkeys(('BOOL', 'U8', 'I8', 'F8_E4M3', 'F8_E5M2', 'F8_E8M0'), 8),
    **dict.fromkeys(('F8_E4M3FNUZ', 'F8_E5M2FNUZ'), 8),
    **dict.fromkeys(('U16', 'I16', 'F16', 'BF16'), 16),
    **dict.fromkeys(('U32', 'I32', 'F32'), 32),
    **dict.fromkeys(('U64', 'I64', 'F64', 'C64'), 64),
}


@pytest.fixture
def bundle(tmp_path):
    spec = tiny_spec('pi0', advantage='task_newline', delta=True)
    numbers = np.ones(len(spec.state))
    write_bundle(
        tmp_path / 'bundle',
        spec,
        weights={f'tensor.{n}': np.ones((2, n + 1), np.float32) for n in range(3)},
        statistics={
            'state.q01': -numbers,
            'state.q99': numbers,
            'actions.mean': 0 * numbers,
            'actions.std': numbers,
        },
        tokenizer=TOKENIZER,
    )
    return tmp_path / 'bundle'


@pytest.mark.parametrize('count', COUNTS)
def test_whatever_policy_yaml_says_expect_a_bundle_or_a_bundle_error(bundle, count):
    path = bundle / 'policy.yaml'
    good = path.read_bytes()

    def one(random: Random) -> None:
        path.write_bytes(mutated(good, random))
        read_bundle(bundle, verify=False)

    accepted, refused = fuzz(count, 'policy.yaml', one, BundleError)
    assert accepted > 0 and refused > count / 2


@pytest.mark.parametrize('count', COUNTS)
def test_whatever_a_robot_file_says_expect_a_robot_or_a_robot_error(tmp_path, count):
    path = tmp_path / 'robot.yaml'
    (tmp_path / 'robot.urdf').write_bytes(URDF)
    robots = [(ROBOTS / f'{name}.yaml').read_bytes() for name in ('so101', 'tabletop')]

    def one(random: Random) -> None:
        path.write_bytes(mutated(random.choice(robots), random))
        load_robot(path)

    accepted, refused = fuzz(count, 'robot.yaml', one, RobotError)
    assert accepted > 0 and refused > count / 2


@pytest.mark.parametrize('count', COUNTS)
def test_whatever_a_weights_header_says_expect_tensors_or_an_own_error(bundle, tmp_path, count):
    folder = tmp_path / 'checkpoint'
    folder.mkdir()
    path, statistics = bundle / 'weights.safetensors', bundle / 'statistics.safetensors'
    good, good_statistics = path.read_bytes(), statistics.read_bytes()

    def one(random: Random) -> None:
        spoiled = random.choice(('weights', 'weights', 'statistics', 'both'))
        path.write_bytes(good if spoiled == 'statistics' else _with_header(good, random))
        statistics.write_bytes(
            good_statistics if spoiled == 'weights' else _with_header(good_statistics, random)
        )
        shutil.copyfile(path, folder / 'model.safetensors')
        if random.random() < 0.5:
            for tensor in read_tensors(folder).values():
                assert tensor.offset + tensor.size <= path.stat().st_size
        read_bundle(bundle, verify=False)
        reader = SafetensorsReader(path)
        if 'tensor.1' in {tensor.name for tensor in read_header(path)}:
            assert reader.read('tensor.1').shape == reader.shape('tensor.1')

    accepted, refused = fuzz(count, 'weights', one, (BundleError, CheckpointError))
    assert accepted > 0 and refused > count / 2


@pytest.mark.parametrize('count', COUNTS)
def test_whatever_a_file_of_torch_save_says_expect_tensors_or_an_own_error(tmp_path, count):
    path, numbers = tmp_path / 'head.pt', random_numbers()
    torch.save(numbers, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    (described,) = (name for name in parts if name.endswith('data.pkl'))

    def one(random: Random) -> None:
        if random.random() < 0.3:
            path.write_bytes(mutated(whole, random))
        else:
            with zipfile.ZipFile(path, 'w') as archive:
                for name, content in parts.items():
                    spoilt = mutated(content, random) if name == described else content
                    archive.writestr(name, spoilt)
        for tensor in read_archive(path):
            assert len(tensor.data()) == tensor.size

    accepted, refused = fuzz(count, 'head.pt', one, CheckpointError)
    assert accepted > 0 and refused > count / 2


@pytest.mark.parametrize('target', ['tensor', 'reader', 'state dict'])
def test_what_a_torch_file_sets_attributes_of_expect_a_state_dict_alone(tmp_path, target):
    path = tmp_path / 'head.pt'
    torch.save(random_numbers(), path)
    expected = read_archive(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    (described,) = (name for name in parts if name.endswith('data.pkl'))
    # A dict of one entry, and BUILD, which makes its entries attributes of what lies before it.
    build = b'}X\x06\0\0\0offsetJ' + struct.pack('<i', -1000) + b'sb'
    content = parts[described]
    at, added = {
        # Before the entries become those of the state dict, the last tensor is on top.
        'tensor': (len(content) - 2, build),
        # One more argument that the tensor does not use.
        'reader': (content.index(b'\x89') + 1, b'ctorch._utils\n_rebuild_tensor_v2\n' + build),
        'state dict': (len(content) - 1, build),
    }[target]
    parts[described] = content[:at] + added + content[at:]
    with zipfile.ZipFile(path, 'w') as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    if target == 'state dict':
        assert [one.shape for one in read_archive(path)] == [one.shape for one in expected]
        return
    with pytest.raises(CheckpointError) as error:
        read_archive(path)
    assert str(path) in str(error.value)


def test_numbers_of_a_torch_file_that_do_not_lie_one_after_the_other_are_read_in_order(tmp_path):
    numbers = torch.arange(8, dtype=torch.bfloat16).reshape(4, 2)
    torch.save(OrderedDict(a=numbers.t(), b=torch.nn.Parameter(numbers[1:])), tmp_path / 'head.pt')
    found = {one.name: one for one in read_archive(tmp_path / 'head.pt')}
    for name, expected in (('a', numbers.t()), ('b', numbers[1:])):
        assert (found[name].dtype, found[name].shape) == ('BF16', tuple(expected.shape))
        assert found[name].data() == expected.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_torch_file_with_compressed_numbers_is_refused(tmp_path):
    path, packed = tmp_path / 'head.pt', tmp_path / 'packed.pt'
    torch.save(random_numbers(), path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, 'w', zipfile.ZIP_DEFLATED) as to:
        for name in archive.namelist():
            to.writestr(name, archive.read(name))
    with pytest.raises(CheckpointError, match='compressed'):
        read_archive(packed)


def random_numbers() -> OrderedDict[str, torch.Tensor]:
    return OrderedDict((f'module.fc{n}.weight', torch.ones(n, 3)) for n in range(1, 4))


def _with_header(data: bytes, random: Random) -> bytes:
    """A safetensors file with a mutated header, of the right length more often than not."""
    (length,) = struct.unpack('<Q', data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    if random.random() < 0.1:
        return data[: 8 + length] + bytes(byte ^ random.randrange(256) for byte in body)
    if random.random() < 0.1:
        return mutated(data, random)
    if random.random() < 0.2:
        header, body = _retyped(json.loads(header), random)
    elif random.random() < 0.3:
        header = json.dumps(_edited(json.loads(header), random)).encode()
    else:
        header = mutated(header, random, KINDS)
    length = len(header) if random.random() < 0.9 else random.choice((0, 1, 1 << 40, 2**64 - 1))
    return struct.pack('<Q', length) + header + body


def _retyped(document: dict, random: Random) -> tuple[bytes, bytes]:
    """Header and body of tensors of these names and shapes, all of another dtype."""
    dtype = random.choice(list(DTYPES))
    end = 0
    for name in sorted(document.keys() - {'__metadata__'}):
        begin, shape = end, document[name]['shape']
        end += math.prod(shape) * DTYPES[dtype] // 8
        document[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [begin, end]}
    return json.dumps(document).encode(), bytes(end)


def _edited(document: dict, random: Random) -> dict:
    name = random.choice(list(document))
    value = random.choice((None, [], {}, 'F32', 2**70, -1, {'dtype': 'F32'}, [[1]]))
    key = random.choice(('dtype', 'shape', 'data_offsets', 'more'))
    if isinstance(document[name], dict) and random.random() < 0.8:
        document[name] = {**document[name], key: value}
    else:
        document[random.choice((name, '', '\x00', 'x' * 3000, '__metadata__'))] = value
    return document
