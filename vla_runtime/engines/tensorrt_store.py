"""Built engines on disk: `engines/<gpu>-trt<version>/` in a bundle, with `engine.json` beside them.

An engine is tied to the GPU and the TensorRT version that it was built with, and it was built from
certain ONNX files. Invariants:
- `engine.json` is written after the file it speaks of, each under its name complete or not at all;
- an engine of another GPU, version or ONNX file is refused, with the command that rebuilds it;
- nothing here reads more of a bundle than that folder and the names of the ONNX files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vla_runtime.engines.cuda_runtime import DeviceInfo
from vla_runtime.engines.onnx_files import Network, graph_name

METADATA = 'engine.json'
TIMING_CACHE = 'timing.cache'
RECEIPT = 'verification.json'
FORMAT = 1
_BLOCK = 1 << 22


@dataclass(frozen=True)
class EngineFile:
    """One built engine.

    Attributes:
        file: its name in the folder.
        size: in bytes; another size is a file cut short.
        onnx_sha256: of the ONNX graph it was built from and the weights that the graph names.
        seconds: how long the build took.
        scratch_bytes: device memory that it needs while it runs.
        layers: of the parsed network.
        pinned: on TensorRT 8.6, layers pinned to each type.
    """

    file: str
    size: int
    onnx_sha256: str
    seconds: float
    scratch_bytes: int
    layers: int
    pinned: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Metadata:
    """What `engine.json` says.

    Attributes:
        tensorrt: version that built the engines.
        gpu, capability, processors: the GPU that they were built on.
        precision: of the ONNX files.
        captures: how often a CUDA graph is captured at load; the fastest is kept.
        engines: by name, see `engine_names`.
    """

    tensorrt: str
    gpu: str
    capability: str
    processors: int
    precision: str
    captures: int
    engines: dict[str, EngineFile]

    @property
    def max_rows(self) -> int:
        """Most prompt rows that engines were built for, complete or not."""
        pairs = [name for name in self.engines if '_r' in name]
        return max((int(name.rpartition('_r')[2]) for name in pairs), default=1)


def engine_name(network: Network, rows: int = 1) -> str:
    """What an engine is called: as its ONNX graph, without the ending."""
    return graph_name(network, rows).removesuffix('.onnx')


def engine_names(rows: Iterable[int]) -> tuple[str, ...]:
    """The engines of a policy that runs with these numbers of prompt rows."""
    pair: tuple[Network, ...] = ('prefix', 'expert')
    return ('vision', *(engine_name(network, count) for count in rows for network in pair))


def folder_name(gpu: str, version: str) -> str:
    """`nvidia-h200-trt10.3.0` for `NVIDIA H200` and `10.3.0`."""
    return re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-') + f'-trt{version}'


def rebuild_command(bundle: Path) -> str:
    return f'vla_runtime build {bundle}'


def find_engines(
    bundle: Path, device: DeviceInfo, version: str, max_rows: int
) -> tuple[Path, Metadata]:
    """The folder of the engines that were built for this GPU and version, and what it says.

    Args:
        bundle: the bundle's folder.
        device: the GPU at hand.
        version: of the TensorRT at hand.
        max_rows: most prompt rows that will be asked for; engines of more need not be whole.

    Raises:
        ValueError: none were built for here (what was built for elsewhere is named), or what is
            there is damaged, incomplete or older than the ONNX files.
    """
    engines = bundle / 'engines'
    folder = engines / folder_name(device.name, version)
    command = rebuild_command(bundle)
    if not folder.is_dir():
        others = sorted(path.name for path in engines.glob('*-trt*') if path.is_dir())
        seen = f'; built for elsewhere: {", ".join(others)}' if others else ''
        raise ValueError(
            f'{folder}: no engines were built for {device.name} with TensorRT {version}{seen}. '
            f'Engines run only on the GPU and version they were built with; run: {command}'
        )
    metadata = read_metadata(folder, command)
    _check_origin(folder / METADATA, metadata, device, version, command)
    for name in engine_names(range(1, min(max_rows, metadata.max_rows) + 1)):
        entry = metadata.engines.get(name)
        if entry is None:
            built = ', '.join(metadata.engines) or 'none'
            raise ValueError(
                f"{folder / METADATA}: engine '{name}' was not built (built: {built}); "
                f'run: {command}'
            )
        path = folder / entry.file
        if not path.is_file():
            raise ValueError(f'{path}: is missing; run: {command}')
        if path.stat().st_size != entry.size:
            raise ValueError(
                f'{path}: has {path.stat().st_size} bytes, but {METADATA} says {entry.size}; '
                f'the file is damaged; run: {command}'
            )
    return folder, metadata


def read_metadata(folder: Path, command: str) -> Metadata:
    """Read `engine.json`.

    Raises:
        ValueError: it is missing or damaged; the message ends with `command`.
    """
    path = folder / METADATA
    try:
        data = json.loads(path.read_text(encoding='utf-8'))
        if not isinstance(data, dict):
            raise ValueError('it is not a table')
        if data.get('format') != FORMAT:
            raise ValueError(f"field 'format' is {data.get('format')!r}, expected {FORMAT}")
        engines = {
            name: EngineFile(**_fields(EngineFile, entry, f'engines.{name}'))
            for name, entry in _table(data.get('engines'), 'engines').items()
        }
        values = _fields(Metadata, {**data, 'engines': {}}, '')
        return replace(Metadata(**values), engines=engines)
    except FileNotFoundError:
        raise ValueError(f'{path}: is missing; the build did not finish; run: {command}') from None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f'{path}: is damaged: {error}; run: {command}') from None


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Write `engine.json`, replacing it in one go."""
    text = json.dumps({'format': FORMAT, **asdict(metadata)}, indent=2, sort_keys=True) + '\n'
    write_file(folder / METADATA, text.encode())


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file that appears under its name complete or not at all.

    Raises:
        OSError: among others, the disk is full; nothing is left behind.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f'.{path.name}.', dir=path.parent)
    try:
        with os.fdopen(descriptor, 'wb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def files_sha256(paths: list[Path]) -> str:
    """One SHA-256 over several files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open('rb') as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


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


def _table(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"field '{name}' is not a table")
    return value


def _fields(kind: type, data: object, name: str) -> dict[str, Any]:
    """The values of a dataclass's fields, each present and of its type."""
    table = _table(data, name)
    known = {'str': str, 'int': int, 'float': (int, float)}
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
