"""Software and devices of this machine, without joining a graph: nothing here imports ROS 2."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from vla_runtime.engines.cuda_driver import CudaDriver, format_version, import_cuda
from vla_runtime.engines.preflight import driver_cuda_version, driver_devices, missing_backend
from vla_runtime.engines.tensorrt.adapter import import_tensorrt
from vla_runtime.nodes.doctor.findings import Finding, note, ok, problem
from vla_runtime.nodes.doctor.jetpack import JetPack, jetpack_of, read_l4t
from vla_runtime.nodes.middleware import (
    PROFILE_VARIABLES,
    describe_reach,
    is_fast_dds,
    why_no_shared_memory,
)

AREA = 'machine'
# Python that the packages of a release of ROS 2 are built for.
_PYTHON_OF_ROS = {
    'humble': (3, 10),
    'jazzy': (3, 12),
    'kilted': (3, 12),
    'lyrical': (3, 14),
}
# adjtimex(2): the kernel's clock is not synchronised.
_TIME_ERROR = 5
_CAMERAS = 'docs/howto/cameras.md#images-without-loss'
_JETSON = 'docs/howto/jetson.md'


def machine_findings(environment: Mapping[str, str], shm: Path = Path('/dev/shm')) -> list[Finding]:
    """Look at Python, ROS 2, middleware, shared memory, clock, PyTorch, CUDA and TensorRT.

    Args:
        environment: variables of this process before it joins a graph.
        shm: folder of the shared memory.
    """
    return [
        _python(environment),
        *_ros(environment),
        *_middleware(environment, shm),
        _clock(),
        *_devices(),
    ]


def _python(environment: Mapping[str, str]) -> Finding:
    text = f'{platform.python_version()} ({sys.executable})'
    distribution = environment.get('ROS_DISTRO', '')
    wanted = _PYTHON_OF_ROS.get(distribution)
    sourced = any(path.startswith('/opt/ros/') for path in sys.path)
    if sourced and wanted and wanted != sys.version_info[:2]:
        return problem(
            AREA,
            'Python',
            f'{text}, and the sourced ROS 2 {distribution} is built for {format_version(wanted)}',
            f'use the Python of that ROS: /usr/bin/python{format_version(wanted)}, in a virtual '
            'environment made with it',
        )
    return ok(AREA, 'Python', text)


def why_no_ros(environment: Mapping[str, str]) -> str:
    """Return why this process cannot join a graph; empty where it can.

    A middleware that is not installed ends the process that imports rclpy, so another one tries.
    """
    if importlib.util.find_spec('rclpy') is None:
        return "No module named 'rclpy'"
    tried = [sys.executable, '-c', 'from rclpy.node import Node']
    done = subprocess.run(
        tried, env={**environment}, capture_output=True, text=True, timeout=60, check=False
    )
    if not done.returncode:
        return ''
    said = (done.stderr or done.stdout).strip().splitlines() or ['it ends at once']
    return said[-1].partition(', at /')[0]


def _ros(environment: Mapping[str, str]) -> Iterator[Finding]:
    distribution = environment.get('ROS_DISTRO') or 'its wheels, no ROS_DISTRO'
    why, chosen = why_no_ros(environment), environment.get('RMW_IMPLEMENTATION')
    if why and chosen and 'rclpy' not in why:
        package = chosen.replace('_', '-')
        yield problem(
            AREA,
            'ROS 2',
            f'RMW_IMPLEMENTATION={chosen} does not start: {why}',
            f'sudo apt install ros-$ROS_DISTRO-{package}, or unset RMW_IMPLEMENTATION',
        )
    elif why:
        yield problem(
            AREA,
            'ROS 2',
            f'rclpy does not start: {why}',
            'source /opt/ros/DISTRO/setup.bash in this shell, or let ./run exec bring its own: '
            'docs/howto/install.md',
        )
    else:
        try:
            release = metadata.version('ros-rclpy')
        except metadata.PackageNotFoundError:
            release = ''
        yield ok(AREA, 'ROS 2', f'{distribution}, rclpy {release}'.strip())


def _middleware(environment: Mapping[str, str], shm: Path) -> Iterator[Finding]:
    name = environment.get('RMW_IMPLEMENTATION') or 'rmw_fastrtps_cpp, which is the default'
    if not is_fast_dds(environment):
        yield note(
            AREA,
            'middleware',
            f'{name}: the profile for large images is for Fast DDS',
            'look whether raw images come without loss, below; docs/howto/install.md says what was '
            'tried',
        )
    else:
        yield ok(AREA, 'middleware', name)
    yield ok(AREA, 'graph', describe_reach(environment))
    for variable in PROFILE_VARIABLES:
        given = environment.get(variable)
        if given and not Path(given).is_file():
            yield problem(
                AREA,
                'profile',
                f'{variable} names {given}, which is no file: Fast DDS runs with 512 KiB of shared '
                'memory and loses large images',
                f'correct the variable, or unset it: the launch sets it ({_CAMERAS})',
            )
    if full := why_no_shared_memory(environment, shm):
        why, _, mend = full.partition('. Remove')
        yield problem(AREA, 'shared memory', why, f'remove{mend}')
    elif is_fast_dds(environment) and shm.is_dir():
        room = os.statvfs(shm)
        free, total = (n * room.f_frsize / 2**20 for n in (room.f_bavail, room.f_blocks))
        yield ok(AREA, 'shared memory', f'{shm} has {free:.0f} MB free of {total:.0f}')


def _clock() -> Finding:
    # struct timex is 208 bytes; the first says that nothing is to be changed.
    request = ctypes.create_string_buffer(256)
    state = -1
    with suppress(AttributeError, OSError):
        state = ctypes.CDLL(None).adjtimex(request)
    if state == _TIME_ERROR:
        return note(
            AREA,
            'clock',
            'the kernel calls it not synchronised',
            'of no matter on one computer; with drivers on others install chrony on all of them',
        )
    if state < 0:
        return note(AREA, 'clock', 'the system does not say whether it is synchronised')
    return ok(AREA, 'clock', 'synchronised')


def _devices() -> Iterator[Finding]:
    count, reason = driver_devices()
    driver = driver_cuda_version()
    l4t = read_l4t()
    jetpack = None if l4t is None else jetpack_of(l4t)
    if l4t is not None:
        yield _jetson(l4t, jetpack)
    if count:
        devices = f'{count} device{"s" if count > 1 else ""}'
        yield ok(AREA, 'CUDA', f'{devices}, driver for CUDA {format_version(driver)}')
    else:
        yield note(AREA, 'CUDA', f'none: {reason}', 'of no matter where the CPU is to run it')
    yield _torch(count, driver)
    if count or jetpack is not None or not missing_backend('tensorrt'):
        yield _tensorrt(jetpack)
    if count:
        yield _bindings()


def _jetson(l4t: tuple[int, int], jetpack: JetPack | None) -> Finding:
    release = f'Jetson Linux R{l4t[0]}.{l4t[1]}'
    if jetpack is None:
        return problem(
            AREA, 'Jetson', f'{release}: older than JetPack 6.1', f'flash JetPack 6.2: {_JETSON}'
        )
    goes = (
        f'CUDA {format_version(jetpack.cuda)}, TensorRT {jetpack.tensorrt}, Python '
        f'{format_version(jetpack.python)}, ROS 2 {jetpack.ros}, cuda-bindings {jetpack.bindings}'
    )
    if sys.version_info[:2] != jetpack.python:
        return problem(
            AREA,
            'Jetson',
            f'{release}, JetPack {jetpack.name} goes with {goes}; this is Python '
            f'{platform.python_version()}',
            f"use the system's Python, for which JetPack's TensorRT is built: {_JETSON}",
        )
    return ok(AREA, 'Jetson', f'{release}, JetPack {jetpack.name}: {goes}')


def _torch(devices: int, driver: tuple[int, int]) -> Finding:
    found = installed_torch()
    if found is None:
        level = note if missing_backend('onnxruntime') is None else problem
        return level(
            AREA,
            'PyTorch',
            'not installed',
            "exported bundles run without it; else ./run setup, or pip install '.[torch]' in the "
            'source folder',
        )
    version, cuda = found
    if not devices:
        return ok(AREA, 'PyTorch', f'{version}, for {f"CUDA {cuda}" if cuda else "CPUs alone"}')
    if not cuda:
        return problem(
            AREA,
            'PyTorch',
            f'{version} is built for CPUs alone, and a GPU answers here',
            f'install a build for CUDA {driver[0]} (pytorch.org/get-started; on a Jetson {_JETSON})'
            ', or use TensorRT or ONNX Runtime on the GPU',
        )
    if int(cuda.split('.')[0]) > driver[0]:
        return problem(
            AREA,
            'PyTorch',
            f'{version} is built for CUDA {cuda}, and the driver is for {format_version(driver)}',
            f'install a build for CUDA {driver[0]}, or update the NVIDIA driver',
        )
    return ok(AREA, 'PyTorch', f'{version}, for CUDA {cuda}')


def installed_torch() -> tuple[str, str] | None:
    """Return PyTorch's version and that of its CUDA, '' for none; importing it takes seconds."""
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec('torch')
        if spec is not None and spec.origin is not None:
            text = (Path(spec.origin).parent / 'version.py').read_text()
            version = re.search(r"^__version__.*?= '([^']+)'", text, re.MULTILINE)
            cuda = re.search(r"^cuda\b.*?= '([^']+)'", text, re.MULTILINE)
            return version[1] if version else 'unknown', cuda[1] if cuda else ''
    return None


def _tensorrt(jetpack: JetPack | None) -> Finding:
    try:
        adapter = import_tensorrt()
    except ValueError as error:
        text, _, mend = str(error).removeprefix("backend 'tensorrt': ").partition('; ')
        return note(AREA, 'TensorRT', text, mend or 'or choose another backend')
    what = 'TensorRT for RTX' if adapter.is_rtx else 'TensorRT'
    if jetpack is not None and not f'{adapter.version}.'.startswith(f'{jetpack.tensorrt}.'):
        return problem(
            AREA,
            'TensorRT',
            f'{what} {adapter.version}, and JetPack {jetpack.name} has {jetpack.tensorrt}',
            f"remove what pip installed, so that JetPack's is found: {_JETSON}",
        )
    return ok(AREA, 'TensorRT', f'{what} {adapter.version}')


def _bindings() -> Finding:
    """Say whether the bindings, without which TensorRT runs nothing, serve this driver."""
    try:
        driver = CudaDriver(import_cuda())
        driver.find_device(0)
    except ValueError as error:
        text, _, mend = str(error).removeprefix("backend 'tensorrt': ").partition('; ')
        return note(AREA, 'cuda-bindings', text, mend or 'TensorRT runs nothing without them')
    return ok(AREA, 'cuda-bindings', driver.release)
