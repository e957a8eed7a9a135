"""Built engines on disk: `engines/<gpu>-<N>sm-trt<version>/` in a bundle, each with `engine.json`.

Those of TensorRT for RTX are built for compute capabilities, on any machine:
`engines/rtx-<targets>-trtrtx<version>/`. They run on the GPU that they were compared on, which
`engine.json` says from then on.

An engine is tied to the GPU, its number of multiprocessors (which a Jetson's power mode changes),
the TensorRT version, and the ONNX files that it was built from. Invariants:
- `engine.json` is written after the engine it lists; each file appears complete or not at all;
- engines are loaded only after they passed the comparison with the bundle's recorded cases;
- an engine of another GPU, number of multiprocessors, version or ONNX file is refused, with the
  command that rebuilds it;
- the bundle's ONNX files are known by their SHA-256 in policy.yaml: loading engines hashes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from vla_runtime.bundle.onnx_files import (
    CASES_FILE,
    ONNX_FOLDER,
    ROWS_ENDING,
    Network,
    Precision,
    graph_name,
    read_graph_facts,
)
from vla_runtime.bundle.schema import WEIGHTS_FILE
from vla_runtime.engines.cuda_runtime import DeviceInfo
from vla_runtime.engines.tensorrt.rtx import check_gpu, check_targets, target_of
from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.input_files import read_text
from vla_runtime.files.json_file import JsonError

METADATA = 'engine.json'
TIMING_CACHE = 'timing.cache'
# Kernels that TensorRT for RTX compiled on the GPU.
COMPILED = 'compiled.cache'
RECEIPT = 'verification.json'
# Findings about engines that failed the comparison and were removed.
REJECTION = 'rejected.json'
FORMAT = 3
# The engines of a policy.
ENGINES = ('vision', 'prefix', 'expert')
_LARGEST_METADATA = 1 << 24


@dataclass(frozen=True)
class EngineFile:
    """One built engine.

    Attributes:
        file: name in the folder.
        size: size in bytes; another size is a file cut short.
        onnx_sha256: SHA-256 of the ONNX graph and its weights, by name in the bundle.
        seconds: duration of the build.
        scratch_bytes: device memory that it needs while it runs.
        pinned: number of layers pinned to each type, on TensorRT 8.6.
    """

    file: str
    size: int
    onnx_sha256: dict[str, str]
    seconds: float
    scratch_bytes: int
    layers: int
    pinned: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Metadata:
    """Contents of `engine.json`.

    Attributes:
        tensorrt: version that built the engines.
        gpu, capability, processors: the GPU that they were built on; of TensorRT for RTX that they
            were compared on, empty before.
        captures: number of captures of each CUDA graph at load; the fastest is kept.
        rows: most prompt rows; engines take every number from 1 to it.
        engines: built engines by name, see `ENGINES`.
        passed: SHA-256 of the bundle's files that the engines were compared with and agreed, by
            name; empty before.
        targets: compute capabilities that TensorRT for RTX built for, such as `sm89`; else empty.
    """

    tensorrt: str
    gpu: str
    capability: str
    processors: int
    precision: Precision
    captures: int
    rows: int
    engines: dict[str, EngineFile]
    passed: dict[str, str] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)


def network_name(network: Network, rows: int = 1) -> str:
    """Name of the engine that runs a network for this number of prompt rows."""
    return graph_name(network, rows).removesuffix('.onnx')


def graph_of(engine: str) -> str:
    return 'vision.onnx' if engine == 'vision' else f'{engine}{ROWS_ENDING}'


def folder_name(device: DeviceInfo, version: str) -> str:
    """`orin-16sm-trt10.3.0` for an `Orin` with 16 multiprocessors and `10.3.0`."""
    gpu = re.sub(r'[^a-z0-9]+', '-', device.name.lower()).strip('-')
    return f'{gpu}-{device.processors}sm-trt{version}'


def rtx_folder_name(targets: Sequence[str], version: str) -> str:
    """`rtx-sm86-sm89-trtrtx1.7.1.116` for these targets and `1.7.1.116`."""
    return f'rtx-{"-".join(targets)}-trtrtx{version}'


def rebuild_command(bundle: Path, rows: int | None = None, precision: str = '') -> str:
    """Return the command that builds the bundle's ONNX files in a precision, '' for their own.

    `rows` None: what the policy needs.
    """
    precision = precision or _precision_of(bundle)
    # bfloat16 is what a build takes.
    named = '' if precision in ('', 'bfloat16') else f' --precision {precision}'
    return f'vla_runtime build {bundle}{named}' + (f' --rows {rows}' if rows else '')


def _precision_of(bundle: Path) -> str:
    """Precision of the bundle's ONNX files; empty without their facts, which a build will miss."""
    try:
        return read_graph_facts(bundle / ONNX_FOLDER, ()).precision
    except JsonError:
        return ''


def find_engines(
    bundle: Path,
    device: DeviceInfo,
    version: str,
    files: Mapping[str, str],
    *,
    rtx: bool = False,
    passed: bool = True,
) -> tuple[Path, Metadata]:
    """Find the folder of the engines for this GPU and version; return it and its metadata.

    Args:
        files: SHA-256 of the bundle's files by name, as in its policy.yaml.
        rtx: the TensorRT at hand is that for RTX.
        passed: refuse engines that have not passed the comparison.

    Raises:
        ValueError: no engines for this GPU and version (the message names others), or engines that
            are damaged, incomplete, not compared or built from other ONNX files than the bundle's.
    """
    engines = bundle / 'engines'
    command = rebuild_command(bundle)
    if rtx:
        folder = _rtx_folder(engines, device, version, files, command)
    else:
        folder = engines / folder_name(device, version)
    if not folder.is_dir():
        others = sorted(path.name for path in engines.glob('*-trt*') if path.is_dir())
        seen = f'; built for elsewhere: {", ".join(others)}' if others else ''
        raise ValueError(
            f'{folder}: no engines were built for {device.name} with {device.processors} '
            f'multiprocessors and TensorRT {version}{seen}. Engines run only on the GPU and '
            'version they were built with, and a power mode may change the multiprocessors; run: '
            f'{command}'
        )
    metadata = read_metadata(folder, command)
    command = rebuild_command(bundle, metadata.rows)
    for name in ENGINES:
        _check_engine(folder, metadata, name, files, command)
    if passed and rtx and not metadata.passed:
        raise ValueError(
            f"{folder / METADATA}: field 'passed': these engines were built elsewhere and never "
            f'compared on this GPU, and engines run only after that; run here: {command}'
        )
    # Of engines built for targets the GPU is known from the comparison on.
    if passed or not rtx:
        _check_origin(folder / METADATA, metadata, device, version, command)
    if passed and metadata.passed != passed_on(files):
        before = 'with other weights or cases' if metadata.passed else 'not'
        raise ValueError(
            f"{folder / METADATA}: field 'passed': these engines were {before} compared with the "
            f"bundle's recorded cases, and engines run only after that; run: {command}"
        )
    return folder, metadata


def find_rtx_folder(
    engines: Path, device: DeviceInfo, version: str, files: Mapping[str, str]
) -> Path | None:
    """Find the folder of engines of TensorRT for RTX for a GPU's compute capability.

    First comes one built from the bundle's `files`, then one that passed the comparison on this
    GPU, then the one that was built last.
    """
    target = target_of(device.capability)

    def rank(folder: Path) -> tuple[bool, bool, float, str]:
        try:
            metadata = read_metadata(folder, '')
            for name in ENGINES:
                _check_engine(folder, metadata, name, files, '')
            built = max((folder / metadata.engines[name].file).stat().st_mtime for name in ENGINES)
        except (ValueError, OSError):
            return False, False, 0.0, folder.name
        here = (device.name, device.capability, device.processors)
        known = here == (metadata.gpu, metadata.capability, metadata.processors)
        return True, known and metadata.passed == passed_on(files), built, folder.name

    folders = [
        folder
        for folder in engines.glob(f'rtx-*-trtrtx{version}')
        if folder.is_dir() and target in targets_of(folder)
    ]
    return max(folders, key=rank, default=None)


def state_of(folder: Path, files: Mapping[str, str]) -> str:
    """Return in words what engines in a folder, or a file there, are, whatever GPU is here."""
    if not folder.is_dir():
        return 'no folder of engines'
    if not (folder / METADATA).is_file():
        return 'failed the comparison' if (folder / REJECTION).is_file() else 'incomplete'
    command = rebuild_command(folder.parents[1])
    try:
        metadata = read_metadata(folder, command)
    except ValueError as error:
        return str(error)
    command = rebuild_command(folder.parents[1], metadata.rows)
    there = [name for name in ENGINES if name in metadata.engines]
    what = f'{metadata.precision}, {metadata.rows} prompt row(s)'
    if len(there) < len(ENGINES):
        return f'{what}, incomplete: {len(there)} of {len(ENGINES)} networks'
    try:
        for name in ENGINES:
            _check_engine(folder, metadata, name, files, command)
    except ValueError as error:
        return f'{what}, not usable: {error}'
    if not metadata.passed:
        return f'{what}, not compared'
    if metadata.passed != passed_on(files):
        return f'{what}, compared with other weights or cases'
    return f'{what}, passed on {metadata.gpu}'


def targets_of(folder: Path) -> tuple[str, ...]:
    """Return the targets in the name of a folder of `rtx_folder_name`."""
    return tuple(folder.name.split('-trtrtx')[0].split('-')[1:])


def _rtx_folder(
    engines: Path, device: DeviceInfo, version: str, files: Mapping[str, str], command: str
) -> Path:
    """Find the folder of engines for this GPU's compute capability (ValueError: none)."""
    check_gpu(device.name, device.capability)
    if folder := find_rtx_folder(engines, device, version, files):
        return folder
    target = target_of(device.capability)
    check_targets((target,), _precision_of(engines.parent))
    others = sorted(path.name for path in engines.glob('*-trt*') if path.is_dir())
    seen = f'; built for elsewhere: {", ".join(others)}' if others else ''
    raise ValueError(
        f'{engines}: no engines were built for {device.name} ({target}) and TensorRT for RTX '
        f'{version}{seen}. Engines run only on the compute capabilities and the version they were '
        f'built for; run here: {command}, or on any machine: {command} --target {target}'
    )


def passed_on(files: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 of the weights and recorded cases that a bundle's engines are compared with."""
    return {name: files.get(name, '') for name in (WEIGHTS_FILE, f'{ONNX_FOLDER}/{CASES_FILE}')}


def read_metadata(folder: Path, command: str) -> Metadata:
    """Read `engine.json` (ValueError: missing or damaged; the message ends with `command`)."""
    path = folder / METADATA
    try:
        data = json.loads(read_text(path, _LARGEST_METADATA))
        if not isinstance(data, dict):
            raise ValueError('it is not a table')
        if data.get('format') != FORMAT:
            raise ValueError(f"field 'format' is {data.get('format')!r}, expected {FORMAT}")
        engines = {
            name: EngineFile(**_fields(EngineFile, entry, f'engines.{name}'))
            for name, entry in _table(data.get('engines'), 'engines').items()
        }
        for name, entry in engines.items():
            _check_sources(name, entry)
        # Older files have no targets.
        values = _fields(Metadata, {'targets': [], **data, 'engines': {}}, '')
        if values['precision'] not in get_args(Precision):
            raise ValueError(f"field 'precision' is {values['precision']!r}, which is none")
        return replace(Metadata(**values), engines=engines)
    except FileNotFoundError:
        why = 'the build did not finish'
        if (folder / REJECTION).is_file():
            why = f'what was built gave wrong numbers and was not kept ({REJECTION} has them)'
        raise ValueError(f'{path}: is missing; {why}; run: {command}') from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f'{path}: is damaged: {error}; run: {command}') from None


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Write `engine.json`, replacing it in one go."""
    text = json.dumps({'format': FORMAT, **asdict(metadata)}, indent=2, sort_keys=True) + '\n'
    write_text(folder / METADATA, text)


def _check_origin(
    path: Path, metadata: Metadata, device: DeviceInfo, version: str, command: str
) -> None:
    here = {
        'tensorrt': version,
        'gpu': device.name,
        'capability': device.capability,
        'processors': device.processors,
    }
    for name, value in here.items():
        built = getattr(metadata, name)
        if built != value:
            raise ValueError(
                f"{path}: field '{name}': the engines were built with {built!r}, here it is "
                f'{value!r}. Engines run only on the GPU and version they were built with; '
                f'run: {command}'
            )


def _check_engine(
    folder: Path, metadata: Metadata, name: str, files: Mapping[str, str], command: str
) -> None:
    entry = metadata.engines.get(name)
    if entry is None:
        built = ', '.join(metadata.engines) or 'none'
        raise ValueError(
            f"{folder / METADATA}: engine '{name}' was not built (built: {built}); run: {command}"
        )
    path = folder / entry.file
    if not path.is_file():
        raise ValueError(f'{path}: is missing; run: {command}')
    if path.stat().st_size != entry.size:
        raise ValueError(
            f'{path}: has {path.stat().st_size} bytes, but {METADATA} says {entry.size}; '
            f'the file is damaged; run: {command}'
        )
    for source, built_from in entry.onnx_sha256.items():
        now = files.get(source)
        if now != built_from:
            here = f'whose SHA-256 is {now[:12]}…' if now else 'which the bundle does not have'
            raise ValueError(
                f"{path}: was built from another {source} ({built_from[:12]}…) than the bundle's, "
                f'{here}; run: {command}'
            )


def _check_sources(name: str, entry: EngineFile) -> None:
    graph = f'{ONNX_FOLDER}/{graph_of(name)}'
    digests = entry.onnx_sha256
    if graph not in digests or not all(isinstance(value, str) for value in digests.values()):
        raise ValueError(f"field 'engines.{name}.onnx_sha256' has no SHA-256 of {graph}")


def _table(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"field '{name}' is not a table")
    return value


def _fields(kind: type, data: object, name: str) -> dict[str, Any]:
    table = _table(data, name)
    known = {'str': str, 'Precision': str, 'int': int, 'float': (int, float), 'list[str]': list}
    values = {}
    for entry in fields(kind):
        where = f'{name}.{entry.name}'.strip('.')
        if entry.name not in table:
            raise ValueError(f"field '{where}' is missing")
        value = table[entry.name]
        expected: Any = known.get(str(entry.type), dict)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ValueError(f"field '{where}' is {value!r}, expected a {entry.type}")
        values[entry.name] = value
    return values
