"""Engines on disk and everything that can be wrong with them, each named with its remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_tensorrt import RELEASES
from onnx_bundles import reseal
from paths import ROOT
from tensorrt_machine import Machine, linked_copy, write_exported_policy
from thorough import thorough_after
from tiny_policy import observation

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines import free_memory
from vla_runtime.engines.cuda_runtime import device_index
from vla_runtime.engines.tensorrt.store import METADATA, folder_name
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy


@pytest.fixture(scope='module')
def exported(tmp_path_factory) -> Path:
    return write_exported_policy(tmp_path_factory.mktemp('store') / 'policy')


@pytest.fixture
def machine(monkeypatch, exported, tmp_path):
    def make(**options) -> Machine:
        bundle = tmp_path / 'policy'
        return Machine(
            monkeypatch, bundle if bundle.exists() else linked_copy(exported, bundle), **options
        )

    return make


def rebuilds(here: Machine, rows: int | None = None) -> str:
    command = f'run: vla_runtime build {here.bundle} --precision float32'
    return f'{command} --rows {rows}' if rows else command


def engines(here: Machine) -> Path:
    (folder,) = (here.bundle / 'engines').iterdir()
    return folder


def refused(here: Machine, **options) -> str:
    """The error of loading; nothing stays on the device."""
    with pytest.raises(ValueError) as error:
        here.load(**options)
    assert here.cuda.live == (0, 0)
    return str(error.value)


def test_a_policy_on_tensorrt_gives_the_chunk_of_torch(machine):
    here = machine()
    here.build()
    settings = PolicySettings(cfg_enabled=True, cfg_beta=1.7)
    chunks = []
    for backend, device in (('torch', 'cpu'), ('tensorrt', 'cuda')):
        policy = Policy.load(here.bundle, backend, device, settings=settings)
        chunks.append(policy.infer(observation(3))[0].actions)
        policy.close()
    assert np.abs(chunks[0] - chunks[1]).max() <= 1e-5
    assert here.cuda.live == (0, 0)


def test_a_built_engine_is_stored_for_its_gpu_and_version(machine):
    here = machine(name='NVIDIA H200', release=RELEASES[1])
    here.build(captures=2)
    assert engines(here).name == 'nvidia-h200-16sm-trt10.3.0'
    data = json.loads((engines(here) / METADATA).read_text())
    assert (data['gpu'], data['tensorrt'], data['precision']) == (
        'NVIDIA H200',
        '10.3.0',
        'float32',
    )
    assert data['captures'] == 2
    names = ['expert', 'prefix', 'vision']
    assert sorted(data['engines']) == names
    assert sorted(path.stem for path in engines(here).glob('*.engine')) == names


def test_folder_names_are_plain(machine):
    device = machine(name='NVIDIA GeForce RTX 4090', processors=128).runtime().info
    assert folder_name(device, '11.4.0.106') == 'nvidia-geforce-rtx-4090-128sm-trt11.4.0.106'


def test_every_power_mode_finds_its_own_engines(machine):
    machine(processors=8).build()
    here = machine(processors=4)
    message = refused(here)
    assert 'for Orin with 4 multiprocessors' in message
    assert 'built for elsewhere: orin-8sm-trt' in message and message.endswith(rebuilds(here))
    here.build()
    assert len(list((here.bundle / 'engines').iterdir())) == 2
    machine(processors=8).load().close()
    machine(processors=4).load().close()


def test_too_little_memory_is_not_called_a_wrong_engine(machine):
    here = machine()
    here.build()
    here.trt.short = 'always'
    message = refused(here)
    assert 'vision.engine: not enough memory to load it; end what else uses memory' in message
    assert 'building again does not help' in message and 'OutOfMemory' in message
    assert here.cuda.live == (0, 0)


def test_no_engines(machine):
    here = machine()
    message = refused(here)
    assert 'no engines were built for Orin with 16 multiprocessors and TensorRT 11.4' in message
    assert message.endswith(rebuilds(here))


def test_engines_of_another_gpu(machine):
    machine(name='Thor').build()
    here = machine(name='Orin')
    message = refused(here)
    assert 'built for elsewhere: thor-16sm-trt' in message and message.endswith(rebuilds(here))


def test_engines_of_another_version(machine):
    machine(release=RELEASES[1]).build()
    here = machine(release=RELEASES[2])
    message = refused(here)
    assert 'and TensorRT 10.13.0.35; built for elsewhere: orin-16sm-trt10.3.0' in message
    assert message.endswith(rebuilds(here))


@pytest.mark.parametrize(
    ('field', 'value'),
    [('gpu', 'Thor'), ('tensorrt', '10.3.0'), ('processors', 8), ('capability', '11.0')],
)
def test_engines_renamed_to_fit_are_found_out(machine, field, value):
    here = machine()
    here.build()
    change(here, **{field: value})
    message = refused(here)
    assert f"field '{field}'" in message and message.endswith(rebuilds(here, rows=2))


def change(here: Machine, **fields) -> None:
    path = engines(here) / METADATA
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ('text', 'told'),
    [
        ('', 'is damaged'),
        ('{"format": 3', 'is damaged'),
        ('[]', 'it is not a table'),
        # An engine for each number of rows, as before this format.
        ('{"format": 2}', "field 'format' is 2, expected 3"),
        ('{"format": 3}', "field 'engines' is not a table"),
        ('{"format": 3, "engines": {"vision": {}}}', "field 'engines.vision.file' is missing"),
        ('{"format": 3, "engines": {}, "tensorrt": 5}', "field 'tensorrt' is 5, expected a str"),
    ],
)
def test_damaged_metadata(machine, text, told):
    here = machine()
    here.build()
    (engines(here) / METADATA).write_text(text)
    message = refused(here)
    assert told in message and str(engines(here) / METADATA) in message
    assert message.endswith(rebuilds(here))


@pytest.mark.parametrize(
    ('entry', 'told'),
    [
        ({'onnx_sha256': {}}, "field 'engines.vision.onnx_sha256' has no SHA-256 of onnx/vision"),
        ({'onnx_sha256': {'onnx/vision.onnx': 5}}, 'has no SHA-256 of onnx/vision.onnx'),
        ({'onnx_sha256': 'ab'}, "field 'engines.vision.onnx_sha256' is 'ab', expected a dict"),
    ],
)
def test_an_engine_of_unknown_onnx_files_is_damaged_metadata(machine, entry, told):
    here = machine()
    here.build()
    data = json.loads((engines(here) / METADATA).read_text())
    data['engines']['vision'] |= entry
    change(here, engines=data['engines'])
    message = refused(here)
    assert told in message and message.endswith(rebuilds(here))


def test_a_precision_that_is_none_is_damaged_metadata(machine):
    here = machine()
    here.build()
    change(here, precision='float24')
    assert "field 'precision' is 'float24'" in refused(here)


@pytest.mark.parametrize(
    ('name', 'engine'),
    thorough_after(1, [('weights.data', 'vision'), ('expert_rows.onnx', 'expert')]),
)
def test_engines_of_other_onnx_files_are_refused(machine, name, engine):
    here = machine()
    here.build()
    path, weights = here.bundle / 'onnx' / name, here.bundle / 'onnx' / 'weights.data'
    graph, numbers = path.read_bytes(), weights.read_bytes()
    for link in {path, weights}:
        link.unlink()
    # Another producer's name: as good a graph, but not the one that was built.
    path.write_bytes(graph.replace(b'vla_runtime', b'vla_rantime'))
    if path == weights:
        numbers = bytes([numbers[0] ^ 1]) + numbers[1:]
    weights.write_bytes(numbers)
    reseal(here.bundle)
    message = refused(here)
    assert f'{engines(here) / engine}.engine: was built from another onnx/{name} (' in message
    assert message.endswith(rebuilds(here, rows=2))
    with pytest.raises(ValueError, match='onnx'):
        Policy.load(here.bundle, 'tensorrt', 'cuda')
    here.build()
    here.load().close()


def test_engines_of_onnx_files_that_the_bundle_does_not_have_are_refused(machine):
    here = machine()
    here.build()
    files = read_bundle(here.bundle).spec.files
    less = {name: digest for name, digest in files.items() if name != 'onnx/prefix_rows.onnx'}
    assert 'which the bundle does not have' in refused(here, files=less)


def test_loading_does_not_read_the_onnx_files_weights(machine):
    here = machine()
    here.build()
    weights = here.bundle / 'onnx' / 'weights.data'
    weights.unlink()
    weights.touch()
    here.load().close()


def test_missing_metadata_is_a_build_that_did_not_finish(machine):
    here = machine()
    here.build()
    (engines(here) / METADATA).unlink()
    assert 'the build did not finish' in refused(here)


def test_a_missing_and_a_truncated_engine_file(machine):
    here = machine()
    here.build()
    path = engines(here) / 'expert.engine'
    path.write_bytes(path.read_bytes()[:-1])
    message = refused(here)
    assert str(path) in message and 'the file is damaged' in message
    path.unlink()
    message = refused(here)
    assert f'{path}: is missing' in message and message.endswith(rebuilds(here, rows=2))


def test_an_engine_that_tensorrt_refuses(machine):
    here = machine()
    here.build()
    path = engines(here) / 'prefix.engine'
    path.write_bytes(b'x' * path.stat().st_size)
    message = refused(here)
    assert str(path) in message and 'TensorRT says' in message and rebuilds(here)[5:] in message


def test_engines_that_were_built_for_one_row_guide_row_by_row(machine):
    here = machine()
    here.build(rows=1)
    engine = here.load(max_rows=2)
    assert engine.max_rows == 1
    engine.close()
    settings = PolicySettings(cfg_enabled=True, cfg_beta=1.7)
    chunks = []
    for backend, device in (('torch', 'cpu'), ('tensorrt', 'cuda')):
        policy = Policy.load(here.bundle, backend, device, settings=settings)
        chunks.append(policy.infer(observation(3))[0].actions)
        policy.close()
    assert np.abs(chunks[0] - chunks[1]).max() <= 1e-5
    with pytest.raises(ValueError, match='cfg_mode'):
        policy = Policy.load(here.bundle, 'tensorrt', 'cuda', settings=settings)
        policy.settings = PolicySettings(cfg_enabled=True, cfg_beta=1.5, cfg_mode='fused')
        policy.infer(observation(3))


def test_an_engine_that_was_not_built_is_refused(machine):
    here = machine()
    here.build()
    data = json.loads((engines(here) / METADATA).read_text())
    del data['engines']['prefix']
    change(here, engines=data['engines'])
    assert "engine 'prefix' was not built (built: " in refused(here)


def test_another_precision_than_asked_for(machine):
    here = machine()
    here.build()
    message = refused(here, precision='float16')
    assert 'were built in float32' in message


def test_engines_that_do_not_fit_are_refused_before_they_are_loaded(machine):
    machine().build()
    here = machine(total_bytes=200 << 20, integrated=False)
    message = refused(here)
    assert 'the engines need about 0.3 GB and 0.2 GB are free' in message
    assert here.trt.used == set()


def test_memory_that_the_file_cache_would_give_up_counts_where_the_gpu_shares_it(
    machine, monkeypatch, tmp_path
):
    meminfo = tmp_path / 'meminfo'
    monkeypatch.setattr(free_memory, '_MEMINFO', meminfo)
    machine().build()
    # CUDA counts the pages that nobody uses, and hashing the bundle has just filled the cache.
    here = machine()
    monkeypatch.setattr(here.cuda, 'cuMemGetInfo', lambda: (0, 200 << 20, 1 << 32))
    meminfo.write_text('MemFree: 204800 kB\nMemAvailable: 2097152 kB\n')
    here.load().close()
    meminfo.write_text('MemFree: 204800 kB\nMemAvailable: 262144 kB\n')
    # The larger of the two is told.
    assert 'the engines need about 0.3 GB and 0.3 GB are free' in refused(here)
    meminfo.unlink()
    assert 'and 0.2 GB are free' in refused(here)


def test_memory_that_runs_out_while_loading(machine, monkeypatch):
    from vla_runtime.engines.tensorrt import loading as tensorrt_loading

    monkeypatch.setattr(tensorrt_loading, 'LOAD_RESERVE_BYTES', 0)
    machine().build()
    here = machine(total_bytes=40_000)
    assert 'not enough memory for the engines' in refused(here)


@pytest.mark.parametrize('device', ['cpu', 'cuda:', 'cuda:x', 'cuda:-1', 'gpu'])
def test_devices_that_are_none(device):
    with pytest.raises(ValueError, match='cuda'):
        device_index(device)


def test_device_names():
    assert (device_index('cuda'), device_index('cuda:3')) == (0, 3)


def test_a_machine_without_a_driver(machine):
    here = machine(devices=None)
    message = refused(here)
    assert "device 'cuda:0': no CUDA device answers here" in message
    assert 'cuda-bindings 12.9.10' in message and 'nvidia-smi' in message
    assert 'no NVIDIA driver is installed, libcuda.so.1 is not found' in message
    # TensorRT, which would take the process down, was not asked.
    assert here.trt.used == set()


def test_a_device_that_is_not_there(machine):
    assert 'there are 1 CUDA devices' in refused(machine(), device='cuda:1')


# In a process of its own: what is imported there is what a robot's process imports.
_LOAD = """
import sys
from pathlib import Path
{prepare}
from vla_runtime.declarations.pi import PI05
from vla_runtime.engines.tensorrt.engine import TensorRTEngine
try:
    TensorRTEngine.load(Path('no_bundle'), 'pi05', PI05, files=dict(), device='cuda',
                        precision='float16', max_rows=1, denoise_steps=10,
                        use_cuda_graphs=True)
except ValueError as error:
    print(error)
heavy = ('torch', 'onnx', 'onnxruntime', 'rclpy', 'safetensors', 'yaml', 'cv2')
print('imported:', [name for name in heavy if name in sys.modules])
"""
_A_TENSORRT = """
import types
sys.path.insert(0, {test!r})
from fake_tensorrt import FakeTensorRT
sys.modules['tensorrt'] = FakeTensorRT('10.3.0')
for name in ('onnxruntime',):
    sys.modules.pop(name, None)
"""
_A_CUDA = """
from fake_cuda import FakeCuda
for name in ('cuda', 'cuda.bindings'):
    sys.modules[name] = types.ModuleType(name)
sys.modules['cuda.bindings.driver'] = FakeCuda(devices={devices})
"""


@pytest.mark.parametrize(
    ('prepare', 'told'),
    [
        ("sys.modules['tensorrt'] = None", "the Python package 'tensorrt' is not installed"),
        (
            _A_TENSORRT + "sys.modules['cuda'] = None",
            "the Python package 'cuda-bindings' is not installed",
        ),
        (_A_TENSORRT + _A_CUDA.format(devices=None), 'no CUDA device answers here'),
        (_A_TENSORRT + _A_CUDA.format(devices=1), 'no engines were built for Orin'),
    ],
    ids=['no tensorrt', 'no cuda-bindings', 'no driver', 'no engines'],
)
def test_what_is_missing_is_told_without_importing_anything_heavy(prepare, told):
    prepare = prepare.replace('{test!r}', repr(str(ROOT / 'test')))
    result = subprocess.run(
        [sys.executable, '-c', _LOAD.format(prepare=prepare)], capture_output=True, text=True
    )
    assert told in result.stdout, result.stderr
    assert 'imported: []' in result.stdout
