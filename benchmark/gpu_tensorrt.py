"""Builds and measures a pi0.5 with TensorRT on a GPU machine.

    python benchmark/gpu_tensorrt.py prepare KIT [--precision int8]   here: torch, onnxruntime
    python benchmark/gpu_tensorrt.py run KIT [--json OUT]             there: tensorrt, cuda-bindings

By default its widths are the published ones and it has two layers. `prepare --size full` makes the
published policy with three cameras, on the GPU machine itself, and times it in PyTorch there.

`prepare` writes our ONNX graphs, inputs and ONNX Runtime's outputs, a few megabytes (remove
KIT/onnx/weights.data before carrying it: the weights are drawn again there; those in int8 have to
travel). `run` needs tensorrt, cuda-bindings and numpy (on a terminal tqdm) and no install: it
builds the engines, compares each with ONNX Runtime's outputs, captures the graphs, compares whole
chunks of one and two prompt rows, and times them with and without graphs. A chunk of a second robot
has to be that of the first, bit for bit.

Exit code: 0, 1 where a check failed, 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmark')]

from vla_convert.export.tensorrt.build import build_engines, plan_build  # noqa: E402
from vla_runtime.bundle.onnx_files import (  # noqa: E402
    ONNX_FOLDER,
    TEXT_INPUT,
    WEIGHTS_DATA,
)
from vla_runtime.declarations.pi import PI05, PiDims  # noqa: E402
from vla_runtime.engines.cuda_driver import CudaError  # noqa: E402
from vla_runtime.engines.cuda_runtime import CudaRuntime  # noqa: E402
from vla_runtime.engines.preflight import check_backend  # noqa: E402
from vla_runtime.engines.protocol import SLOTS, StepInputs  # noqa: E402
from vla_runtime.engines.tensorrt.adapter import Network, TensorRT, TensorRTError, import_tensorrt  # noqa: E402
from vla_runtime.engines.tensorrt.buffers import DeviceArray  # noqa: E402
from vla_runtime.engines.tensorrt.engine import TensorRTEngine  # noqa: E402
from vla_runtime.engines.tensorrt.loading import load_networks  # noqa: E402
from vla_runtime.engines.tensorrt.store import ENGINES, Metadata, network_name  # noqa: E402
from vla_runtime.engines.token_embedding import TokenEmbedding  # noqa: E402
from vla_runtime.family.dimensions import DecoderDims, VisionDims  # noqa: E402
from vla_runtime.family.listing import find_family  # noqa: E402
from vla_runtime.files.atomic_write import file_sha256  # noqa: E402
from vla_runtime.files.safetensors_reader import float32_to_bfloat16  # noqa: E402

SIZES = ('reduced_depth', 'tiny', 'full')
ROWS = (1, 2)
STEPS = 10
_MANIFEST, _KEPT, _REFERENCE = 'manifest.json', 'kept.npz', 'reference.npz'
# ONNX's numbers for the types of drawn weights; numpy has no bfloat16.
_FLOAT32, _FLOAT16, _BFLOAT16 = 1, 10, 16
_STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    _FLOAT32: lambda values: values.astype(np.float32),
    _FLOAT16: lambda values: values.astype(np.float16),
    _BFLOAT16: lambda values: float32_to_bfloat16(values.astype(np.float32)),
}
# Smaller weights travel as they are.
_DRAWN_SIZE = 1 << 10
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Weight:
    """A tensor in weights.data; `kind` is ONNX's number for its type."""

    name: str
    kind: int
    dims: list[int]
    offset: int
    length: int


@dataclass(frozen=True)
class Kit:
    """A prepared folder, complete and laid out as a bundle (`onnx/`, later `engines/`).

    `precision` of the ONNX files: bfloat16's reference is of float32 files, int8's (with bfloat16
    beside) of the same 8-bit products with float32 beside. `reference`: see `prepare`; `pytorch`:
    figures of a kit prepared on the GPU machine.
    """

    folder: Path
    dims: PiDims
    precision: str
    reference: dict[str, np.ndarray]
    pytorch: dict[str, Any]

    def step_inputs(self, rows: int) -> StepInputs:
        names = ('x', 'row_weight', 'plan', 'plan_weight')
        return StepInputs(**{name: self.reference[f'{name}_r{rows}'] for name in names})


def kit_dims(size: str) -> PiDims:
    """pi0.5 as published; with every width so, two layers and one camera; or tiny, for tests."""
    if size == 'full':
        # Rows of the text table are looked up on the host: a small one serves.
        return replace(PI05, cameras=3, vocabulary=4096)
    full = replace(PI05, cameras=1, vocabulary=4096)
    if size == 'reduced_depth':
        return replace(
            full,
            vision=replace(full.vision, depth=2),
            language=replace(full.language, depth=2),
            expert=replace(full.expert, depth=2),
        )
    language = DecoderDims(32, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=1, head_dim=8)
    return replace(
        full,
        vision=VisionDims(24, depth=1, num_heads=2, mlp_dim=32, patch_size=14, image_size=28),
        language=language,
        expert=replace(language, width=16, mlp_dim=32),
        vocabulary=400,
        prompt_length=24,
        horizon=8,
    )


def prepare(folder: Path, size: str, precision: str, seed: int = 0) -> None:
    """Write graphs, drawn weights, inputs and ONNX Runtime's outputs.

    `reference.npz` holds the inputs by name (`pixels`, `text_embeddings_r2`, …), the time table,
    and for one and two rows `image_tokens`, `past_key_rR`, `past_value_rR`, `velocity_rR` (of the
    first step)
    and `chunk_rR`. The folder appears complete or not at all.

    Raises ValueError: the folder exists, or ONNX Runtime cannot run the files.
    """
    if folder.exists():
        raise ValueError(f'{folder}: exists already; remove it or give another folder')
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'{folder.name}.') as scratch:
        kit = Path(scratch, 'kit')
        kit.mkdir()
        (_prepare_on_gpu if size == 'full' else _prepare)(kit, Path(scratch), size, precision, seed)
        kit.rename(folder)


def _prepare(folder: Path, bundle: Path, size: str, precision: str, seed: int) -> None:
    from parts.random_policy import random_network
    from safetensors.numpy import save_file

    from vla_convert.export.onnx.export import write_onnx
    from vla_runtime.family.listing import read_time_table
    from vla_runtime.inference.denoise import flow_times

    dims = kit_dims(size)
    network = random_network('pi05', dims, 'cpu', 'float32', seed)
    weights = bundle / 'weights.safetensors'
    save_file({name: value.numpy() for name, value in network.state_dict().items()}, weights)
    del network
    compared = 'float32' if precision == 'bfloat16' else precision
    tensors: list[Weight] = []
    if precision == 'int8':
        _write_int8(folder, bundle, _spec(dims), seed)
    else:
        write_onnx(bundle, _spec(dims), precision)
        for path in (bundle / ONNX_FOLDER).glob('monolithic*'):
            path.unlink()
        (bundle / ONNX_FOLDER).rename(folder / ONNX_FOLDER)
        tensors = _draw_all(folder, seed)
        if precision == 'bfloat16':
            # ONNX Runtime multiplies none on a CPU: the same weights in float32 are the reference.
            write_onnx(bundle, _spec(dims), 'float32')
            _draw_all(bundle, seed)
        else:
            # The engine takes a bundle.
            (bundle / ONNX_FOLDER).symlink_to((folder / ONNX_FOLDER).resolve())
    table = read_time_table('pi05', dims, weights)(flow_times(STEPS))
    np.savez(folder / _REFERENCE, **_reference(bundle, dims, compared, table, seed))
    manifest = {
        'size': size,
        'precision': precision,
        'seed': seed,
        'dims': asdict(dims),
        'tensors': [asdict(tensor) for tensor in tensors],
        'weights_sha256': file_sha256(folder / ONNX_FOLDER / WEIGHTS_DATA),
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + '\n')


def _prepare_on_gpu(
    folder: Path, bundle: Path, size: str, precision: str, seed: int, device: str = 'cuda'
) -> None:
    """Fill a folder with files and PyTorch's float32 outputs, of weights rounded to bfloat16."""
    import torch
    from parts.random_policy import infer, random_inputs, random_network, torch_engine
    from safetensors.torch import save_file

    from vla_convert.export.onnx.export import write_onnx
    from vla_runtime.family.listing import read_time_table
    from vla_runtime.inference.denoise import flow_times
    from vla_runtime.models.base.flow_step import Prefix

    if precision == 'int8':
        raise ValueError('a kit of the full size is float32, float16 or bfloat16')
    dims = kit_dims(size)
    network = random_network('pi05', dims, device, 'bfloat16', seed)
    weights = bundle / 'weights.safetensors'
    save_file({name: value.cpu() for name, value in network.state_dict().items()}, weights)
    write_onnx(bundle, _spec(dims), precision)
    for path in (bundle / ONNX_FOLDER).glob('monolithic*'):
        path.unlink()
    text = TokenEmbedding.of(bundle, precision)
    (bundle / ONNX_FOLDER).rename(folder / ONNX_FOLDER)
    pytorch = _pytorch_milliseconds(network) if device == 'cuda' else {}
    network = network.float()
    engine = torch_engine(network, graphs=False)
    reference: dict[str, np.ndarray] = {
        'time_table': read_time_table('pi05', dims, weights)(flow_times(STEPS))
    }
    for rows in ROWS:
        inputs = random_inputs(dims, rows, seed, steps=STEPS)
        reference |= _inputs(inputs, rows)
        reference[f'{TEXT_INPUT}_r{rows}'] = text(inputs.prefix_inputs['tokens'])
        with torch.no_grad():
            on_gpu = {
                name: torch.from_numpy(np.asarray(value)).to(device)
                for name, value in (
                    ('pixels', inputs.pixels),
                    ('image_mask', inputs.image_mask),
                    *inputs.prefix_inputs.items(),
                    ('x', inputs.step_inputs.x[None]),
                    ('conditioning', reference['time_table'][:1]),
                )
            }
            image_tokens = network.vision(on_gpu['pixels'])
            prompt = {name: on_gpu[name] for name in inputs.prefix_inputs}
            past = Prefix(network)(image_tokens, on_gpu['image_mask'], prompt)
            x = on_gpu['x'].expand(rows, -1, -1)
            velocity = network.velocity(x, past, on_gpu['conditioning'])
            outputs = {'past_key': past['past_key'], 'past_value': past['past_value']}
            outputs['velocity'] = velocity
            reference['image_tokens'] = image_tokens.float().cpu().numpy()
            for name, value in outputs.items():
                reference[f'{name}_r{rows}'] = value.float().cpu().numpy()
        reference[f'chunk_r{rows}'] = infer(engine, inputs)
    engine.close()
    np.savez(folder / _REFERENCE, **reference)
    manifest = {
        'size': size,
        'precision': precision,
        'seed': seed,
        'dims': asdict(dims),
        'tensors': [],
        'pytorch': pytorch,
        'weights_sha256': file_sha256(folder / ONNX_FOLDER / WEIGHTS_DATA),
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + '\n')


def _pytorch_milliseconds(network: Any) -> dict[str, Any]:
    """Time the same policy in PyTorch, in bfloat16: operators and Triton kernels, in graphs."""
    from parts.gpu_latency import GRAPH, TRITON_GRAPH, measure

    cameras = network.dims.cameras
    return {
        f'{mode.name}, {rows} row(s)': measure(network, 'pi05', cameras, rows, mode, repeats=50)
        for mode in (GRAPH, TRITON_GRAPH)
        for rows in ROWS
    }


def _write_int8(folder: Path, bundle: Path, spec: Any, seed: int) -> None:
    """Write files in int8 with bfloat16 beside to the kit, and with float32 to the bundle."""
    import shutil

    from vla_convert.export.onnx.cases import seeded_cases
    from vla_convert.export.onnx.eight_bits import EightBits
    from vla_convert.export.onnx.export import write_onnx
    from vla_convert.export.onnx.quantised import measured_ranges
    from vla_runtime.engines.devices import check_int8

    check_int8()
    write_onnx(bundle, spec, 'float32')
    # The kit has no tokenizer.
    cases = seeded_cases(bundle, replace(spec, tokenizer=None))
    ranges = measured_ranges(bundle, spec, cases)
    for beside in ('bfloat16', 'float32'):
        shutil.rmtree(bundle / ONNX_FOLDER)
        write_onnx(bundle, spec, 'int8', quantised=EightBits(ranges, beside))
        if beside == 'bfloat16':
            shutil.copytree(bundle / ONNX_FOLDER, folder / ONNX_FOLDER)


def _reference(
    bundle: Path, dims: PiDims, precision: str, table: np.ndarray, seed: int
) -> dict[str, np.ndarray]:
    """Inputs, and what ONNX Runtime makes of them; see `prepare`."""
    from parts.random_policy import random_inputs

    from vla_runtime.engines.onnx.engine import OnnxEngine

    engine = OnnxEngine('pi05', dims, bundle, device='cpu', precision=precision, max_rows=max(ROWS))
    text = TokenEmbedding.of(bundle, precision)
    reference: dict[str, np.ndarray] = {'time_table': table}
    for rows in ROWS:
        inputs = random_inputs(dims, rows, seed, steps=STEPS)
        reference |= _inputs(inputs, rows)
        reference[f'{TEXT_INPUT}_r{rows}'] = text(inputs.prefix_inputs['tokens'])
        reference |= _network_outputs(bundle / ONNX_FOLDER, reference, rows)
        reference[f'chunk_r{rows}'] = _chunk(engine, inputs)
    engine.close()
    return reference


def restore(folder: Path) -> Kit:
    """Read a prepared folder and draw its weights if missing.

    Raises ValueError: no prepared folder, or weights that are not those of `prepare`.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        with np.load(folder / _REFERENCE) as file:
            reference = dict(file)
    except FileNotFoundError as error:
        raise ValueError(
            f'{error.filename}: is missing; make the folder with: gpu_tensorrt.py prepare {folder}'
        ) from None
    weights = folder / ONNX_FOLDER / WEIGHTS_DATA
    if not weights.is_file():
        if manifest['precision'] == 'int8':
            raise ValueError(f'{weights}: is missing; the weights of a kit in int8 travel with it')
        _draw(folder, [Weight(**tensor) for tensor in manifest['tensors']], manifest['seed'])
    if file_sha256(weights) != manifest['weights_sha256']:
        raise ValueError(f'{weights}: is not what prepare made; remove it and try again')
    dims = _dims(manifest['dims'])
    return Kit(folder, dims, manifest['precision'], reference, manifest.get('pytorch', {}))


def _draw_all(folder: Path, seed: int) -> list[Weight]:
    """Draw the weights of ONNX files as they were exported; keep those that are not drawn."""
    (folder / ONNX_FOLDER / WEIGHTS_DATA).chmod(0o644)
    tensors = _external(folder / ONNX_FOLDER)
    np.savez_compressed(folder / _KEPT, **_kept(folder, tensors))
    _draw(folder, tensors, seed)
    return tensors


def _draw(folder: Path, tensors: Sequence[Weight], seed: int) -> None:
    """Write weights.data: what was kept as it was, all other tensors drawn by their names."""
    with np.load(folder / _KEPT) as file:
        kept = dict(file)
    path = folder / ONNX_FOLDER / WEIGHTS_DATA
    with path.open('wb') as out:
        for tensor in tensors:
            out.seek(tensor.offset)
            key = str(tensor.offset)
            if key in kept:
                out.write(kept[key].tobytes())
            else:
                _draw_tensor(out, tensor, seed)


def _draw_tensor(out: Any, tensor: Weight, seed: int) -> None:
    generator = np.random.PCG64([seed, zlib.crc32(tensor.name.encode())])
    # Keeps activations of order one; queries and keys are smaller, as their scale is folded in.
    bound = (3.0 / tensor.dims[-2]) ** 0.5 * (0.25 if '.attention.' in tensor.name else 1.0)
    left = tensor.dims[-1] * int(np.prod(tensor.dims[:-1], dtype=np.int64))
    while left > 0:
        count = min(left, _BLOCK)
        bits = generator.random_raw((count + 1) // 2).view(np.uint32)[:count]
        values = (bits.astype(np.float64) / 2.0**31 - 1.0) * bound
        out.write(_STORED[tensor.kind](values).tobytes())
        left -= count


def _kept(folder: Path, tensors: Sequence[Weight]) -> dict[str, np.ndarray]:
    """The bytes of all tensors that are not drawn, by their offset."""
    data = np.memmap(folder / ONNX_FOLDER / WEIGHTS_DATA, np.uint8, 'r')
    return {
        str(tensor.offset): np.array(data[tensor.offset : tensor.offset + tensor.length])
        for tensor in tensors
        if not _is_drawn(tensor)
    }


def _is_drawn(tensor: Weight) -> bool:
    # By size, not bytes: the same ones in every precision.
    matrix = tensor.kind in _STORED and len(tensor.dims) == 2
    return matrix and '.weight' in tensor.name and int(np.prod(tensor.dims)) >= _DRAWN_SIZE


def _external(graphs: Path) -> list[Weight]:
    """All tensors of weights.data by their offset, each once."""
    import onnx

    found = {}
    for path in graphs.glob('*.onnx'):
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            if tensor.external_data:
                place = {entry.key: entry.value for entry in tensor.external_data}
                offset, length = int(place['offset']), int(place['length'])
                dims = list(tensor.dims)
                found[offset] = Weight(tensor.name, tensor.data_type, dims, offset, length)
    return [found[offset] for offset in sorted(found)]


def _inputs(inputs: Any, rows: int) -> dict[str, np.ndarray]:
    step = inputs.step_inputs
    return {
        'pixels': inputs.pixels,
        'image_mask': inputs.image_mask,
        **{f'{name}_r{rows}': array for name, array in inputs.prefix_inputs.items()},
        f'x_r{rows}': step.x,
        f'row_weight_r{rows}': step.row_weight,
        f'plan_r{rows}': step.plan,
        f'plan_weight_r{rows}': step.plan_weight,
    }


def _network_outputs(
    onnx: Path, reference: dict[str, np.ndarray], rows: int
) -> dict[str, np.ndarray]:
    """Each graph alone on ONNX Runtime, the expert for one step."""
    import onnxruntime

    names = [network_name(name, rows) for name in ENGINES]

    def run(name: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(
            onnx / f'{name}.onnx', providers=['CPUExecutionProvider']
        )
        return list(session.run(None, inputs))

    (image_tokens,) = run(names[0], {'pixels': reference['pixels']})
    prefix = {
        'image_tokens': image_tokens,
        'image_mask': reference['image_mask'],
        TEXT_INPUT: reference[f'{TEXT_INPUT}_r{rows}'],
        'token_mask': reference[f'token_mask_r{rows}'],
    }
    past_key, past_value, prefix_mask = run(names[1], prefix)
    expert = {
        'past_key': past_key,
        'past_value': past_value,
        'prefix_mask': prefix_mask,
        **expert_inputs(reference, rows),
    }
    _, velocity = run(names[2], expert)
    outputs = {'past_key': past_key, 'past_value': past_value, 'velocity': velocity}
    return {
        'image_tokens': image_tokens,
        **{f'{name}_r{rows}': value.astype(np.float32) for name, value in outputs.items()},
    }


def expert_inputs(reference: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Inputs of the first denoise step, keys and values apart."""
    return {
        'x': reference[f'x_r{rows}'][None],
        'time_conditioning': reference['time_table'][:1],
        't': np.array(1.0, np.float32),
        'dt': np.array(-1.0 / STEPS, np.float32),
        'row_weight': reference[f'row_weight_r{rows}'],
        'plan': reference[f'plan_r{rows}'][None],
        'plan_weight': reference[f'plan_weight_r{rows}'][0][None, :, None],
    }


def _chunk(engine: Any, inputs: Any) -> np.ndarray:
    from parts.random_policy import infer

    return infer(engine, inputs)


def _dims(data: dict[str, Any]) -> PiDims:
    parts = {
        'vision': VisionDims(**data['vision']),
        'language': DecoderDims(**data['language']),
        'expert': DecoderDims(**data['expert']),
    }
    return PiDims(**{**data, **parts})


def _spec(dims: PiDims) -> Any:
    """Names of a policy.yaml around the dimensions, as the exporter wants them."""
    from vla_runtime.bundle.schema import (
        ActionSpec,
        BundleSpec,
        CameraSpec,
        ImageSpec,
        NormalisationSpec,
        StateSpec,
    )
    from vla_runtime.processing.prompts import PromptFormat

    return BundleSpec(
        name='gpu_tensorrt',
        family='pi05',
        dims=dims,
        cameras=(CameraSpec('camera'),),
        images=ImageSpec(padding='centre', resample='bilinear'),
        state=(StateSpec('joint', 'rad'),),
        actions=(ActionSpec('joint', 'rad', 'absolute'),),
        step_time_s=0.02,
        denoise_steps=STEPS,
        prompt=PromptFormat(template='pi05', cleaning='openpi', advantage='task_newline'),
        normalisation=NormalisationSpec(state='identity', actions='identity'),
        tokenizer='tokenizer.model',
    )


PACKAGES = ['tensorrt', 'cuda-python', 'cuda-bindings', 'numpy']
# Largest error as a fraction of the reference's largest number. In float16 ONNX Runtime's CPU
# kernels and TensorRT's add in another order and round differently. The reference of bfloat16
# is of float32 files, and the bound that of receipts; that of int8 has the same products in 8 bits
# and float32 where the engines have bfloat16, so its bound is that of bfloat16.
BOUNDS = {'float32': 1e-3, 'float16': 2e-2, 'bfloat16': 8e-2, 'int8': 8e-2}
REPEATS = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare or run; see the module's docstring for the exit code."""
    arguments = _arguments(argv)
    try:
        if arguments.verb == 'prepare':
            prepare(arguments.kit, arguments.size, arguments.precision)
            print(f'wrote {arguments.kit}')
            return 0
        # The driver is asked first: TensorRT takes seconds to import.
        check_backend('tensorrt', 'cuda')
        adapter = import_tensorrt()
        runtime = CudaRuntime(0)
        figures = measure(restore(arguments.kit), adapter, runtime, arguments.repeats)
    except (ValueError, OSError, CudaError, TensorRTError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    show(figures)
    if arguments.json:
        from parts.measurement import write_result

        print('wrote', write_result('gpu_tensorrt', figures, PACKAGES, arguments.json))
    return 0 if all(check['passed'] for check in figures['checks'].values()) else 1


def measure(kit: Kit, adapter: TensorRT, runtime: CudaRuntime, repeats: int) -> dict[str, Any]:
    """Build, compare and time; everything in a table of plain numbers."""
    print(f'{runtime.info.name}, TensorRT {adapter.version}: building ...', flush=True)
    plan = plan_build(kit.folder, adapter, runtime, rows=max(ROWS), force=True)
    metadata = build_engines(
        plan,
        adapter,
        runtime,
        captures=3,
        report=lambda name, entry: print(f'  {name}: {entry.seconds:.0f} s', flush=True),
    )
    adapter.free_builder()
    networks = load_networks(adapter, runtime, plan.folder, metadata, max(ROWS), kit.folder)
    bound = BOUNDS[kit.precision]
    checks = {
        name: _check(error, bound) for name, error in compare_networks(kit, runtime, networks)
    }
    latency: dict[str, Any] = {}
    status: dict[str, Any] = {}
    for mode, captures in (('graphs', 3), ('plain', 0)):
        for network in networks.values():
            network.close()
        own = CudaRuntime(runtime.index, runtime.module)
        networks = load_networks(adapter, own, plan.folder, metadata, max(ROWS), kit.folder)
        engine = TensorRTEngine(
            find_family('pi05'),
            kit.dims,
            own,
            networks,
            PreparedTable(kit.reference['time_table']),
            max_rows=max(ROWS),
            captures=captures,
            token_embedding=PreparedText(kit.reference),
        )
        engine.prepare(STEPS)
        status[mode] = dict(engine.cuda_graph)
        session, session_bytes = engine.open_session(), engine.session_bytes
        for rows in ROWS:
            chunk = run_chunk(engine, kit, rows)
            error = _error(chunk, kit.reference[f'chunk_r{rows}'])
            checks[f'chunk of {rows} row(s), {mode}'] = _check(error, bound)
            error = _error(run_chunk(engine, kit, rows, session), chunk)
            checks[f'second robot, {rows} row(s), {mode}'] = _check(error, 0.0)
            latency[f'{mode}, {rows} row(s)'] = time_phases(engine, kit, rows, session, repeats)
        engine.close()
    captured = {'passed': set(status['graphs'].values()) == {'captured'}, 'error': 0.0, 'bound': 0}
    return {
        'device': {**vars(runtime.info), 'tensorrt': adapter.version},
        'precision': kit.precision,
        'engines': _engine_figures(metadata),
        'checks': {**checks, 'all graphs captured': captured},
        'cuda_graph': status,
        'latency_ms': latency,
        'session_bytes': session_bytes,
        'pytorch': kit.pytorch,
    }


def compare_networks(
    kit: Kit, runtime: CudaRuntime, networks: Mapping[str, Network]
) -> list[tuple[str, float]]:
    """The error of every network alone, on ONNX Runtime's inputs."""
    reference, found = kit.reference, []
    for rows in ROWS:
        vision, prefix, expert = (network_name(name, rows) for name in ENGINES)
        past = {name: reference[f'{name}_r{rows}'] for name in ('past_key', 'past_value')}
        inputs = {
            'image_tokens': reference['image_tokens'],
            'image_mask': reference['image_mask'],
            TEXT_INPUT: reference[f'{TEXT_INPUT}_r{rows}'],
            'token_mask': reference[f'token_mask_r{rows}'],
        }
        images = kit.dims.cameras * kit.dims.vision.tokens
        valid = np.repeat(reference['image_mask'], images // kit.dims.cameras)[None]
        mask = np.concatenate(
            [np.repeat(valid, rows, axis=0), reference[f'token_mask_r{rows}']], axis=1
        )
        step = {**past, 'prefix_mask': mask, **expert_inputs(reference, rows)}
        if rows == ROWS[0]:
            tokens = [
                run_network(runtime, networks[vision], {'pixels': pixels[None]})['image_tokens']
                for pixels in reference['pixels']
            ]
            error = _error(np.concatenate(tokens), reference['image_tokens'])
            found.append(('vision: image_tokens', error))
        outputs = run_network(runtime, networks[prefix], inputs)
        for name, value in past.items():
            # Padded entries mean nothing.
            seen = mask[None, :, None, :, None]
            found.append((f'{prefix}: {name}', _error(outputs[name] * seen, value * seen)))
        outputs = run_network(runtime, networks[expert], step)
        error = _error(outputs['velocity'], reference[f'velocity_r{rows}'])
        found.append((f'{expert}: velocity', error))
    return found


def run_network(
    runtime: CudaRuntime, network: Network, inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Run one engine once on buffers of its own."""
    arrays = {name: DeviceArray.of(runtime, info) for name, info in network.tensors.items()}
    scratch = runtime.allocate(network.scratch_bytes)
    network.use_scratch(scratch, network.scratch_bytes)
    for name, value in inputs.items():
        arrays[name].write(value)
    network.bind({name: array.address for name, array in arrays.items()})
    network.enqueue(runtime.stream)
    outputs = {
        name: arrays[name].read() for name, info in network.tensors.items() if not info.is_input
    }
    for array in arrays.values():
        array.free()
    runtime.free(scratch)
    return outputs


class PreparedTable:
    """The kit's time table for its only schedule, computed on the preparing machine."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.width = int(rows.shape[1])

    def __call__(self, times: np.ndarray) -> np.ndarray:
        return self._rows


class PreparedText(TokenEmbedding):
    """The kit's rows of the text table, looked up on the preparing machine."""

    def __init__(self, reference: Mapping[str, np.ndarray]) -> None:
        self._reference = reference

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        return self._reference[f'{TEXT_INPUT}_r{len(tokens)}']


def encode(engine: TensorRTEngine, kit: Kit, rows: int, session: int = 0) -> None:
    reference = kit.reference
    prompt = {name: reference[f'{name}_r{rows}'] for name in ('tokens', 'token_mask')}
    engine.encode_prefix(reference['image_mask'], prompt, session * SLOTS)


def run_chunk(engine: TensorRTEngine, kit: Kit, rows: int, session: int = 0) -> np.ndarray:
    for camera, pixels in enumerate(kit.reference['pixels']):
        engine.encode_image(session * kit.dims.cameras + camera, pixels)
    encode(engine, kit, rows, session)
    engine.use_prefix(rows, session * SLOTS)
    engine.load_step_inputs(kit.step_inputs(rows))
    engine.run_steps()
    return engine.read_x()


def time_phases(
    engine: TensorRTEngine, kit: Kit, rows: int, session: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds from the call to the end of the work on the device.

    `session` is that of a second robot, whose prefix is copied before its steps.
    """
    from parts.measurement import percentiles

    phases: dict[str, Callable[[], object]] = {
        'vision': lambda: engine.encode_image(0, kit.reference['pixels'][0]),
        'prefix': lambda: encode(engine, kit, rows),
        f'{STEPS} steps': engine.run_steps,
        'whole chunk': lambda: run_chunk(engine, kit, rows),
        f'{STEPS} steps, second robot': engine.run_steps,
    }
    times: dict[str, dict[str, float]] = {}
    for name, work in phases.items():
        engine.use_prefix(rows, session * SLOTS if 'second' in name else 0)
        samples = []
        for _ in range(repeats + 3):
            engine.synchronize()
            start = perf_counter()
            work()
            engine.synchronize()
            samples.append((perf_counter() - start) * 1e3)
        times[name] = percentiles(samples[3:])
    return times


def show(figures: Mapping[str, Any]) -> None:
    """Print the final short table."""
    print()
    for name, check in figures['checks'].items():
        verdict = 'ok    ' if check['passed'] else 'FAILED'
        print(f'  {verdict} {name}: error {check["error"]:.2e}, at most {check["bound"]:.0e}')
    print(f'\n  a session takes {figures["session_bytes"] / 1e6:.1f} MB of the device')
    print(f'\n  {"median ms":24}' + ''.join(f'{mode:>18}' for mode in figures['latency_ms']))
    for phase in next(iter(figures['latency_ms'].values())):
        values = [mode[phase]['median'] for mode in figures['latency_ms'].values()]
        print(f'  {phase:24}' + ''.join(f'{value:18.3f}' for value in values))
    for name, found in figures['pytorch'].items():
        times = {phase: value['median'] for phase, value in found['milliseconds'].items()}
        print(f'  PyTorch bfloat16, {name}: ' + ', '.join(f'{k} {v:.2f}' for k, v in times.items()))


def _engine_figures(metadata: Metadata) -> dict[str, Any]:
    return {name: vars(entry) for name, entry in metadata.engines.items()}


def _check(error: float, bound: float) -> dict[str, Any]:
    # Written so that NaN fails.
    return {'passed': bool(error <= bound), 'error': error, 'bound': bound}


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a fraction of the largest number expected."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    verbs = parser.add_subparsers(dest='verb', required=True)
    make = verbs.add_parser('prepare', help='write graphs, inputs and reference outputs')
    make.add_argument('kit', type=Path, metavar='KIT', help='folder to make')
    make.add_argument('--size', choices=SIZES, default=SIZES[0])
    make.add_argument('--precision', choices=sorted(BOUNDS), default='bfloat16')
    run = verbs.add_parser('run', help='build, compare and time on this GPU')
    run.add_argument('kit', type=Path, metavar='KIT', help='folder from prepare')
    run.add_argument('--repeats', type=int, default=REPEATS, help='timed runs of each phase')
    run.add_argument('--json', type=Path, metavar='OUT', help='write the figures there')
    return parser.parse_args(argv)


if __name__ == '__main__':
    sys.exit(main())
