"""Bindings and drivers that cannot be used are named with their versions and with what mends it."""

from __future__ import annotations

import shutil
import sys
import types

import pytest
from fake_cuda import CUresult, FakeCuda
from real_bindings import check as real_bindings

from vla_runtime.engines import cuda_driver
from vla_runtime.engines.cuda_driver import CudaDriver, CudaError, import_cuda


def refusal(cuda: FakeCuda, index: int = 0) -> str:
    with pytest.raises(ValueError) as error:
        CudaDriver(cuda).find_device(index)
    return str(error.value)


@pytest.fixture
def bindings(monkeypatch):
    """Makes a release of the bindings the installed one; None for one without a driver half."""

    def install(release: str | None, package: str | None = None) -> None:
        if release is None:
            monkeypatch.setitem(sys.modules, 'cuda.bindings.driver', None)
        else:
            cuda = FakeCuda()
            cuda.__version__ = release
            monkeypatch.setitem(sys.modules, 'cuda.bindings.driver', cuda)
        monkeypatch.setattr(cuda_driver, '_installed', lambda: package)

    return install


@pytest.mark.parametrize('release', ['12.9.1', '12.9.10', '13.0.0', '13.4.4', '13.3.0.post1'])
def test_releases_that_release_the_interpreter_lock_are_taken(bindings, release):
    bindings(release)
    assert cuda_driver.bindings_release(import_cuda()) == release


@pytest.mark.parametrize('release', ['12.6.2.post1', '12.8.0', '12.9.0'])
def test_releases_that_keep_the_interpreter_lock_are_refused_with_the_reason(bindings, release):
    bindings(release)
    with pytest.raises(ValueError) as error:
        import_cuda()
    message = str(error.value)
    assert f"release {release} of the Python package 'cuda-bindings'" in message
    assert 'keeps the interpreter lock' in message and "'cuda-bindings==12.9.*'" in message


def test_a_release_before_the_driver_half_had_its_name_is_refused_by_its_number(bindings):
    bindings(None, package='12.3.0')
    with pytest.raises(ValueError, match='interpreter'):
        import_cuda()


@pytest.mark.parametrize('package', [None, '13.0.3'])
def test_bindings_that_cannot_be_imported_are_named_with_the_reason(bindings, package):
    bindings(None, package)
    with pytest.raises(ValueError, match="'cuda-bindings'"):
        import_cuda()


def test_the_release_is_that_of_the_package_that_the_module_belongs_to(monkeypatch):
    package = types.ModuleType('cuda.bindings')
    package.__version__ = '13.1.0'  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, 'cuda.bindings', package)
    assert cuda_driver.bindings_release(types.ModuleType('cuda.bindings.driver')) == '13.1.0'


def test_without_a_driver_the_package_and_the_library_are_named():
    message = refusal(FakeCuda(devices=None))
    assert message.startswith("device 'cuda:0': no CUDA device answers here")
    assert 'cuda-bindings 12.9.10' in message
    assert 'no NVIDIA driver is installed, libcuda.so.1 is not found' in message


def test_a_driver_that_is_too_old_is_named_with_both_versions():
    cuda = FakeCuda()
    cuda.driver_version = 11040
    message = refusal(cuda)
    assert 'cuda-bindings 12.9.10' in message and 'driver for CUDA 11.4' in message
    assert 'needs one for CUDA 12.0 or newer' in message and 'JetPack 6' in message


@pytest.mark.parametrize('release', ['13.0.3', '13.5.0', '14.0.0'])
@pytest.mark.parametrize('version', [12000, 12060, 12070])
def test_bindings_13_on_a_driver_before_12_8_are_refused_with_the_release_that_serves_it(
    release, version
):
    cuda = FakeCuda()
    cuda.__version__, cuda.driver_version = release, version
    message = refusal(cuda)
    assert f'cuda-bindings {release} needs one for CUDA 12.8 or newer' in message
    assert f'the NVIDIA driver is for CUDA 12.{version // 10 % 100}' in message
    assert "pip install 'cuda-bindings==12.9.*'" in message and 'JetPack' not in message


@pytest.mark.parametrize(
    ('release', 'version'),
    [('13.0.3', 12080), ('13.0.3', 13000), ('12.9.10', 12000), ('12.9.10', 13000)],
)
def test_drivers_that_have_every_function_of_the_bindings_are_taken(release, version):
    cuda = FakeCuda()
    cuda.__version__, cuda.driver_version = release, version
    assert CudaDriver(cuda).find_device(0) == 0


def test_bindings_13_on_a_driver_that_no_release_serves_name_the_driver_alone():
    cuda = FakeCuda()
    cuda.__version__, cuda.driver_version = '13.0.3', 11040
    message = refusal(cuda)
    assert 'needs one for CUDA 12.8 or newer: update the driver' in message
    assert 'JetPack 7' in message and 'pip install' not in message


def test_a_driver_without_the_functions_of_the_bindings_is_too_old():
    cuda = FakeCuda()

    def missing() -> None:
        raise RuntimeError('Failed to get cuGetProcAddress_v2')

    cuda.cuDriverGetVersion = missing
    message = refusal(cuda)
    assert 'cuGetProcAddress_v2' in message and 'the NVIDIA driver is too old' in message


@pytest.mark.parametrize(
    ('code', 'advice'),
    [
        ('CUDA_ERROR_SYSTEM_DRIVER_MISMATCH', 'restart the machine'),
        ('CUDA_ERROR_NO_DEVICE', 'CUDA_VISIBLE_DEVICES'),
        ('CUDA_ERROR_LAUNCH_FAILED', 'nvidia-smi'),
    ],
)
def test_a_driver_that_fails_is_quoted_with_what_mends_it(code, advice):
    cuda = FakeCuda()
    cuda.failing['cuInit'] = CUresult[code]
    message = refusal(cuda)
    assert f'cuInit: {code} (fake: {code})' in message and advice in message
    assert 'driver for CUDA 12.6' in message


def test_no_device_and_a_device_beyond_the_last():
    assert 'the driver shows no GPU' in refusal(FakeCuda(devices=0))
    assert refusal(FakeCuda(devices=2), 2) == (
        "device 'cuda:2': there are 2 CUDA devices here, the first is cuda:0"
    )


def test_a_function_that_the_driver_lacks_is_an_error_of_ours():
    cuda = FakeCuda()
    driver = CudaDriver(cuda)
    driver.find_device(0)

    def missing(*arguments: object) -> None:
        raise RuntimeError('Function "cuGraphLaunch" not found')

    cuda.cuGraphLaunch = missing
    with pytest.raises(CudaError) as error:
        driver.call('cuGraphLaunch', None, None)
    message = str(error.value)
    assert '"cuGraphLaunch" not found; the NVIDIA driver is for CUDA 12.6' in message
    # 12.6 is not too old for these bindings, so no older version is named as what they need.
    assert 'asks it for a function that it lacks: update the driver' in message
    assert 'or newer:' not in message


def test_an_error_that_the_bindings_do_not_know_is_named_by_its_number():
    cuda = FakeCuda()
    driver = CudaDriver(cuda)
    driver.find_device(0)

    def unknown(*arguments: object) -> None:
        raise KeyError(913)

    cuda.cuGraphLaunch = unknown
    with pytest.raises(CudaError):
        driver.call('cuGraphLaunch', None, None)


@pytest.mark.skipif(shutil.which('gcc') is None, reason='gcc makes the library that is driven')
def test_the_real_bindings_drive_every_call(tmp_path):
    try:
        release = cuda_driver.bindings_release(import_cuda())
    except ValueError as error:
        pytest.skip(f'{error}; test/real_bindings/check.py fetches releases and checks them')
    library = real_bindings.compile_library(tmp_path)
    assert release in real_bindings.check_cuda(None, library, taken=True)
