"""Check the CUDA and TensorRT adapters against real bindings of the package index.

    ./run exec python test/real_bindings/check.py                  # every release below
    ./run exec python test/real_bindings/check.py --cuda '13.*'    # one release, and no TensorRT
    ./run exec python test/real_bindings/check.py --tensorrt tensorrt-lean-cu13-bindings=='11.4.*'

Each release is installed into a folder of its own, which is removed afterwards. The CUDA adapter
then runs over a `libcuda.so.1` that gcc makes of fake_libcuda.c: every function that it calls is
called through the real bindings, so names, signatures, conversions and the interpreter lock are
tested, and of the GPU nothing. Releases that must be refused are checked too. Of TensorRT the names
that the adapter uses are looked up; its libraries, gigabytes, are replaced by empty ones.

exit codes: 0 all as expected; 1 one is not; a release that the index does not have is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from ctypes.util import find_library
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Requirement, and whether the adapter takes the release.
CUDA = {
    'cuda-python==12.6.2.post1': False,
    'cuda-bindings==12.9.0': False,
    'cuda-bindings==12.9.1': True,
    'cuda-bindings==12.9.*': True,
    'cuda-bindings==13.0.*': True,
    'cuda-bindings==13.*': True,
}
TENSORRT = (
    'tensorrt-cu12-bindings==10.3.0',
    'tensorrt-cu12-bindings==10.13.*',
    'tensorrt-cu13-bindings==10.16.*',
    'tensorrt-cu13-bindings==11.4.*',
    'tensorrt-lean-cu12-bindings==10.3.0',
    'tensorrt-lean-cu13-bindings==11.4.*',
)
# Libraries that TensorRT's bindings are linked to, and all that they call in them when imported.
TENSORRT_LIBRARIES = ('nvinfer', 'nvinfer_plugin', 'nvonnxparser', 'nvinfer_lean')
TENSORRT_FUNCTIONS = (
    'createInferBuilder_INTERNAL',
    'createInferRefitter_INTERNAL',
    'createInferRuntime_INTERNAL',
    'createNvOnnxParserRefitter_INTERNAL',
    'createNvOnnxParser_INTERNAL',
    'getBuilderPluginRegistry',
    'getNvOnnxParserVersion',
    'getPluginRegistry',
    'initLibNvInferPlugins',
)
# Oldest driver of each major release of cuda-bindings, as fake_libcuda.c takes it, and one on which
# the release has to be refused.
OLDEST_DRIVER = {'12': ('12000', '11040'), '13': ('12080', '12060')}
# A wait of the fake library. Another thread takes a turn about every millisecond of it, fewer on a
# busy machine, and at most one where the wait keeps the interpreter lock.
WAIT_MS = 1000
LEAST_TURNS = 5


def compile_library(folder: Path) -> Path:
    """Make libcuda.so.1 of fake_libcuda.c; return its folder."""
    library = folder / 'libcuda.so.1'
    source = HERE / 'fake_libcuda.c'
    command = ['gcc', '-Wall', '-Werror', '-shared', '-fPIC', '-o', library, source, '-ldl']
    subprocess.run(command, check=True)
    return folder


def compile_tensorrt_libraries(folder: Path) -> Path:
    """Make TensorRT's libraries without anything in them; return their folder."""
    source = folder / 'empty.c'
    source.write_text(
        ''.join(f'void *{name}(void) {{ return 0; }}\n' for name in TENSORRT_FUNCTIONS)
    )
    for name in TENSORRT_LIBRARIES:
        for major in (10, 11):
            library = folder / f'lib{name}.so.{major}'
            subprocess.run(['gcc', '-shared', '-fPIC', '-o', library, source], check=True)
    return folder


def drive(packages: Path | None, library: Path | None, **settings: str) -> tuple[int, str]:
    """Run drive_cuda.py; return its exit code and its last line.

    Args:
        packages: folder with the bindings; None for this environment's.
        library: folder of libcuda.so.1; None for a machine without one.
        settings: settings of fake_libcuda.c, without `FAKE_CUDA_`.
    """
    paths = [str(path) for path in (packages, ROOT) if path]
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths)}
    environment |= {f'FAKE_CUDA_{name}': value for name, value in settings.items()}
    if library:
        environment['LD_LIBRARY_PATH'] = str(library)
    done = subprocess.run(
        [sys.executable, HERE / 'drive_cuda.py'],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = (done.stdout + done.stderr).strip().splitlines() or ['nothing was printed']
    return done.returncode, lines[-1]


def check_cuda(packages: Path | None, library: Path, taken: bool) -> str:
    """Drive a release in every way; return what it is, for the table.

    Raises:
        AssertionError: something is not as expected.
    """
    # A driver newer than every function that any release asks for.
    code, line = drive(packages, library, WAIT_MS=str(WAIT_MS), VERSION='13000')
    if not taken:
        assert code == 2 and 'keeps the interpreter lock' in line, line
        return 'refused: ' + line.partition(';')[0]
    assert code == 0, line
    found = json.loads(line)
    oldest, older = OLDEST_DRIVER[found['bindings'].partition('.')[0]]
    code, line = drive(packages, library, VERSION=oldest)
    assert code == 0, f'a driver {oldest}: {line}'
    # 12.9.1 looks cuGetProcAddress_v2 up first, which 11.4 lacks, and so never reads its version.
    needed = f'needs one for CUDA {int(oldest) // 1000}.{int(oldest) % 1000 // 10} or newer'
    assert found['turns_during_a_wait'] >= LEAST_TURNS, f'a wait stops other threads: {found}'
    assert 'CUDA_ERROR_OUT_OF_MEMORY (out of memory)' in found['out_of_memory'], found
    refusals = [
        (needed, drive(packages, library, VERSION=older)),
        (needed, drive(packages, library, VERSION='11040')),
        (
            'asks it for a function that it lacks',
            drive(packages, library, LACKS='cuDeviceGet', VERSION='13000'),
        ),
    ]
    # A machine with a GPU has a driver of its own.
    if find_library('cuda') is None:
        missing = 'no NVIDIA driver is installed, libcuda.so.1 is not found'
        refusals.append((missing, drive(packages, None)))
    for expected, (code, line) in refusals:
        assert code == 2 and expected in line and found['bindings'] in line, line
    turns = found['turns_during_a_wait']
    return f'{found["bindings"]}: all calls, {turns} turns in {WAIT_MS} ms, refusals named'


def check_tensorrt(packages: Path, libraries: Path) -> str:
    """Look the adapter's names up in one release of TensorRT's bindings."""
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-rs', '-p', 'no:cacheprovider',
         '-W', 'ignore', 'test/runtime/engines/test_tensorrt_adapter.py', '-k', 'real_bindings'],
        cwd=ROOT,
        env={
            **os.environ,
            'PYTHONPATH': f'{packages}{os.pathsep}{ROOT}',
            'LD_LIBRARY_PATH': f'{libraries}{os.pathsep}{os.environ.get("LD_LIBRARY_PATH", "")}',
        },
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and '1 passed' in done.stdout, done.stdout[-1500:]
    return 'every name that the adapter uses is there'


def check_release(requirement: str, check: Callable[[Path], str]) -> bool:
    """Install one release, check it and print a line; False where something is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, '-m', 'pip', 'install', '--quiet', '--only-binary=:all:']
        # Without what cuda-python 13 and TensorRT bring beside the bindings.
        alone = ['--no-deps'] if 'tensorrt' in requirement else []
        done = subprocess.run(
            [*install, *alone, '--target', folder, requirement], capture_output=True, text=True
        )
        if done.returncode != 0:
            print(f'skipped  {requirement}: the index does not have it for this Python')
            return True
        try:
            print(f'ok       {requirement}: {check(Path(folder))}')
        except AssertionError as error:
            print(f'FAILED   {requirement}: {error}')
            return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Check the releases asked for; 1 where one is not as expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--cuda', nargs='*', metavar='RELEASE', help='of cuda-bindings')
    parser.add_argument('--tensorrt', nargs='*', metavar='REQUIREMENT', help='of its bindings')
    arguments = parser.parse_args(argv)
    everything = arguments.cuda is None and arguments.tensorrt is None
    cuda = CUDA if everything else {f'cuda-bindings=={each}': True for each in arguments.cuda or ()}
    tensorrt = TENSORRT if everything else arguments.tensorrt or ()
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        good = [
            check_release(each, lambda packages, taken=taken: check_cuda(packages, library, taken))
            for each, taken in cuda.items()
        ]
        compile_tensorrt_libraries(library)
        good += [
            check_release(each, lambda packages: check_tensorrt(packages, library))
            for each in tensorrt
        ]
    return 0 if all(good) else 1


if __name__ == '__main__':
    sys.exit(main())
