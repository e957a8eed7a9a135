"""Refuse policies that cannot run here before anything slow is imported."""

from __future__ import annotations

import ctypes
import sys
import types

import pytest
from fake_cuda import FakeCuda

from vla_runtime.bundle.onnx_files import engine_graphs
from vla_runtime.engines import preflight
from vla_runtime.engines.devices import check_device, parse_device
from vla_runtime.engines.preflight import (
    check_backend,
    check_cuda_device,
    check_graph_files,
    driver_cuda_version,
    missing_package,
    require_packages,
    unused_gpu,
)


class FakeDriver:
    """The NVIDIA driver's library: answers with a number of devices or with an error code."""

    def __init__(
        self,
        devices: int = 1,
        init: int = 0,
        text: bytes | None = b'out of luck',
        capabilities: tuple[tuple[int, int], ...] = (),
    ):
        self._devices, self._init, self._text = devices, init, text
        self._capabilities = capabilities

    def cuInit(self, flags):  # noqa: N802
        return self._init

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = 13020
        return 0

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self._devices
        return 0

    def cuDeviceGet(self, device, index):  # noqa: N802
        if index >= len(self._capabilities):
            return 101
        # A handle need not be the index.
        device._obj.value = index + 7
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR is 75, that of the minor 76.
        value._obj.value = self._capabilities[device.value - 7][attribute - 75]
        return 0

    def cuDeviceGetName(self, name, length, device):  # noqa: N802
        name.value = f'GPU {device.value - 7}'.encode()
        return 0

    def cuGetErrorString(self, code, text):  # noqa: N802
        text._obj.value = self._text
        return 0


@pytest.fixture
def driver(monkeypatch):
    def be(found: FakeDriver) -> None:
        monkeypatch.setattr(ctypes, 'CDLL', lambda name: found)

    return be


@pytest.mark.parametrize(
    ('device', 'backend', 'expected'),
    [
        ('cpu', 'torch', ('cpu', 0)),
        ('cuda', 'torch', ('cuda', 0)),
        ('cuda:12', 'torch', ('cuda', 12)),
        ('tensorrt:1', 'onnxruntime', ('tensorrt', 1)),
        ('cuda:3', 'tensorrt', ('cuda', 3)),
    ],
)
def test_a_device_is_a_kind_and_an_index(device, backend, expected):
    assert parse_device(device, backend) == expected


@pytest.mark.parametrize(
    ('device', 'backend', 'message'),
    [
        ('gpu', 'torch', "device 'gpu' is unknown to backend 'torch'; use cpu, cuda or cuda:N"),
        ('cpu:1', 'torch', 'unknown'),
        ('cuda:', 'torch', 'unknown'),
        ('cuda:-1', 'torch', 'unknown'),
        ('cuda:٣', 'torch', 'unknown'),
        ('cuda\n', 'torch', 'unknown'),
        ('', 'onnxruntime', 'use cpu, cuda, cuda:N, tensorrt or tensorrt:N'),
        ('tensorrt', 'torch', "device 'tensorrt' is not supported by backend 'torch'"),
        ('cpu', 'tensorrt', "'cpu' is not supported by backend 'tensorrt'; use cuda or cuda:N"),
    ],
)
def test_a_device_that_is_none_names_those_that_are(device, backend, message):
    with pytest.raises(ValueError) as error:
        parse_device(device, backend)
    assert message in str(error.value)


@pytest.mark.parametrize('device', ['cpuu', 'cpu:1', 'gpu', ''])
def test_a_device_of_no_backend_names_those_that_are(device):
    with pytest.raises(ValueError) as error:
        check_device(device)
    assert str(error.value) == (
        f"device '{device}' is unknown; use cpu, cuda, cuda:N, tensorrt or tensorrt:N"
    )


@pytest.mark.parametrize('device', ['cpu', 'cuda', 'cuda:3', 'tensorrt:1'])
def test_a_device_of_some_backend_passes(device):
    check_device(device)


def test_an_unknown_backend_names_those_that_are():
    with pytest.raises(ValueError, match="'jax'"):
        check_backend('jax', 'cpu')


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime', 'tensorrt'])
def test_a_package_that_is_missing_is_named_with_what_installs_it(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, backend, None)
    device = 'cuda' if backend == 'tensorrt' else 'cpu'
    with pytest.raises(ValueError, match=f"'{backend}' is not installed; .*pip install {backend}"):
        check_backend(backend, device)


@pytest.mark.parametrize('devices', [0, 1])
def test_tensorrt_without_package_and_gpu_tells_both_at_once(devices, driver, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tensorrt', None)
    driver(FakeDriver(devices=devices))
    with pytest.raises(ValueError, match="'tensorrt' is not installed") as error:
        check_backend('tensorrt', 'cuda')
    assert ('no CUDA device answers' in str(error.value)) == (devices == 0)


@pytest.mark.parametrize('devices', [0, 1])
def test_tensorrt_on_the_cpu_advises_no_gpu_that_is_not_there(devices, driver):
    driver(FakeDriver(devices=devices))
    with pytest.raises(ValueError, match="backend 'tensorrt'") as error:
        check_backend('tensorrt', 'cpu')
    text = str(error.value)
    assert ('use cuda' in text, "'auto'" in text) == (devices == 1, devices == 0)


def test_what_is_here_passes():
    check_backend('torch', 'cpu')
    check_backend('onnxruntime', 'cpu')


def test_without_a_driver_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(preflight, '_DRIVER', 'libnowhere.so.1')
    with pytest.raises(ValueError) as error:
        check_backend('torch', 'cuda')
    message = str(error.value)
    assert message.startswith("device 'cuda': no CUDA device answers here (no NVIDIA driver")
    assert 'libnowhere.so.1' in message and 'nvidia-smi' in message and 'CPU' in message


@pytest.mark.parametrize(
    ('found', 'reason'),
    [
        (FakeDriver(init=999), 'the driver says: out of luck'),
        (FakeDriver(init=999, text=None), 'the driver says: error 999'),
        (FakeDriver(devices=0), 'the driver shows none'),
    ],
)
def test_a_driver_that_shows_no_device_is_quoted(driver, found, reason):
    driver(found)
    with pytest.raises(ValueError) as error:
        check_cuda_device('cuda:1', 1)
    assert f'no CUDA device answers here ({reason})' in str(error.value)


def test_a_device_beyond_the_last_is_refused(driver):
    driver(FakeDriver(devices=2))
    check_cuda_device('cuda:1', 1)
    with pytest.raises(ValueError, match="'cuda:2'"):
        check_cuda_device('cuda:2', 2)


def test_onnx_runtime_says_which_providers_it_has_before_the_driver_is_asked(monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, 'get_available_providers', lambda: ['CPUExecutionProvider'])
    monkeypatch.setattr(preflight, '_DRIVER', 'libnowhere.so.1')
    with pytest.raises(ValueError, match='no CUDAExecutionProvider'):
        check_backend('onnxruntime', 'cuda')
    listed = ['CUDAExecutionProvider', 'CPUExecutionProvider']
    monkeypatch.setattr(onnxruntime, 'get_available_providers', lambda: listed)
    with pytest.raises(ValueError, match='CUDA'):
        check_backend('onnxruntime', 'cuda')


def test_a_tensorrt_that_is_there_is_not_imported_without_a_gpu(monkeypatch, tmp_path):
    (tmp_path / 'tensorrt').mkdir()
    (tmp_path / 'tensorrt' / '__init__.py').write_text('raise RuntimeError("imported")\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'tensorrt', raising=False)
    monkeypatch.setitem(sys.modules, 'cuda.bindings.driver', FakeCuda(devices=None))
    with pytest.raises(ValueError, match="'cuda:0'"):
        check_backend('tensorrt', 'cuda')


def test_packages_are_looked_up_and_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, 'absent', None)
    monkeypatch.setitem(sys.modules, 'made_by_hand', types.ModuleType('made_by_hand'))
    assert missing_package('numpy', 'made_by_hand') is None
    assert missing_package('numpy', 'absent', 'not_there_either') == 'absent'
    with pytest.raises(ModuleNotFoundError) as error:
        require_packages('numpy', 'absent')
    assert error.value.name == 'absent'


def test_a_graph_file_that_is_missing_is_named_with_what_makes_it(tmp_path):
    (tmp_path / 'onnx').mkdir()
    names = engine_graphs((1, 2))
    assert names == (
        'vision.onnx',
        'prefix.onnx',
        'expert.onnx',
        'prefix_r2.onnx',
        'expert_r2.onnx',
    )
    for name in names[:-1]:
        (tmp_path / 'onnx' / name).touch()
    check_graph_files(tmp_path, engine_graphs((1,)))
    with pytest.raises(ValueError, match=r'expert_r2\.onnx.*vla_runtime'):
        check_graph_files(tmp_path, names)


@pytest.mark.parametrize(
    ('device', 'found', 'warns'),
    [
        ('cpu', FakeDriver(), True),
        ('cpu', FakeDriver(devices=0), False),
        ('cpu', FakeDriver(init=100), False),
        ('cuda', FakeDriver(), False),
    ],
)
def test_a_gpu_that_answers_and_is_not_used_is_worth_a_warning(driver, device, found, warns):
    driver(found)
    assert ('device:=cuda' in unused_gpu(device)) == warns


def test_the_driver_tells_its_cuda_and_none_is_told_without_a_driver(driver, monkeypatch):
    driver(FakeDriver())
    assert driver_cuda_version() == (13, 2)

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, 'CDLL', missing)
    assert driver_cuda_version() == (0, 0)
