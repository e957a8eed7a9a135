"""What the package comes to, part by part: files, chunks, commands. `test_record.py` holds it.

`record_of_results.json` has one line an entry, `PART/ENTRY`; `write_record.py` writes it anew.

- `onnx/FAMILY/PRECISION/...`: the files of a tiny policy's export, whole, and the graphs without
  the numbers of small weights. None has a version of the package, a commit or a time in it.
- `case/FAMILY/CASE/BACKEND`: all chunks of a reference case, from its network's inputs.
- `folder/KIND/NAME/...`: what becomes of a checkpoint's folder: `policy.yaml` field by field,
  without the version that wrote it and without the checksums of files; those are in `files`;
  chunks of recorded observations, in robot units.
- `loop/NAME/commands`: an episode on the tabletop: its commands, its end and the world then.
- `bag/NAME/chunks`: a recording, run again.

A hash is the first 16 digits of a SHA-256. Numbers come out of sums whose order a processor
chooses, so an entry of numbers also has six of them (`like`): where software and arithmetic are
those of the record (`machine`) the hash must be the same, elsewhere these six within `BOUND`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from functools import cache, partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import bitvla_folders
import checkpoint_folders as folders
import groot_folders
import libero_folders
import numpy as np
import onnx
import pytest
import torch
import yaml
from diffusion_cases import load_diffusion_case
from family_contracts import contract_of, contracts
from int8_bundles import OBSERVATIONS
from multi_task_dit_cases import load_multi_task_dit_case
from network_cases import batch_entries
from onnx import TensorProto, helper, numpy_helper
from onnx_bundles import (
    onnx_of_network,
    tied_inputs,
    tiny_onnx_bundle,
    write_onnx_once,
)
from onnxruntime import InferenceSession, SessionOptions
from recorded_bag import ROBOT, first_turns, record
from reference_cases import shipped
from sampled_chunks import chunks as sampled_chunks
from tiny_policy import tiny_spec, write_tiny_policy
from torch import Tensor
from torch.nn import functional as F
from xvla_cases import load_xvla_case

from vla_convert.export.conversion import plan_export, write_export
from vla_convert.export.onnx.calibration import calibration_cases
from vla_convert.export.onnx.quantised import quantise_onnx
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import (
    ONNX_FOLDER,
    QUANTISED,
    Precision,
)
from vla_runtime.bundle.schema import SPEC_FILE, CameraSpec
from vla_runtime.cli.main import main
from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.onnx.token_engine import OnnxTokenEngine
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.engines.torch.token_engine import TorchTokenEngine
from vla_runtime.family.listing import find_family
from vla_runtime.inference.denoise import flow_times
from vla_runtime.inference.packed import write_answer
from vla_runtime.models.base.flow_network import FlowNetwork, build_network
from vla_runtime.policy import Policy
from vla_runtime.recording.bag_reader import BagReader
from vla_tabletop.sim.gl import mujoco
from vla_tabletop.study.chunk_sources import ExpertSource, PolicySource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.episode import run_episode
from vla_tabletop.study.tabletop_world import TabletopWorld
from vla_tools.replay.recorded import read_run
from vla_tools.replay.rerun import Replay
from vla_tools.replay.setup import Changes

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE / 'lerobot_releases'))

import test_releases as releases  # noqa: E402

# A hash of bytes, hashes by field, or numbers: `sha256`, `like`, `scale`, and `drawn` where they
# depend on drawn images.
Entry = str | dict[str, Any]
# Entries of a part by name, made in a folder that is there and empty.
Maker = Callable[[Path], Mapping[str, Entry]]

BACKENDS = ('torch', 'onnxruntime')
# Difference of numbers from another machine's, relative to the largest where that is above one.
BOUND = 1e-5
_DIGITS = 16


# --- entries --------------------------------------------------------------------------------------


def of_bytes(content: bytes, digits: int = _DIGITS) -> str:
    return hashlib.sha256(content).hexdigest()[:digits]


def of_numbers(arrays: Sequence[np.ndarray], more: str = '', drawn: bool = False) -> Entry:
    """Hash arrays with their forms, and `more`; of the numbers keep some."""
    digest = hashlib.sha256(more.encode())
    for array in arrays:
        digest.update(f'{array.dtype} {array.shape}'.encode() + array.tobytes())
    flat = np.concatenate([array.ravel().astype(np.float64) for array in arrays])
    places = np.linspace(0, len(flat) - 1, 6).round().astype(int)
    entry = {
        'sha256': digest.hexdigest()[:_DIGITS],
        'like': [float(f'{value:.7g}') for value in flat[places]],
        'scale': float(f'{np.abs(flat).max():.3g}'),
    }
    return {**entry, 'drawn': True} if drawn else entry


def difference(
    found: Entry | None,
    recorded: Entry | None,
    here: Mapping[str, str],
    there: Mapping[str, str],
) -> str:
    """Say how an entry differs from the recorded one; empty where it does not.

    Args:
        found: entry as it is now; None: nothing makes it.
        recorded: entry of the record; None: it has none.
        here, there: `machine` of each.
    """
    if found == recorded:
        return ''
    if found is None or recorded is None:
        return 'is not made any more' if found is None else 'is not in the record'
    if isinstance(found, str) or isinstance(recorded, str):
        return 'other bytes'
    if 'sha256' not in recorded:
        names = sorted({*found, *recorded})
        return f'other {", ".join(n for n in names if found.get(n) != recorded.get(n))}'
    if found['sha256'] == recorded['sha256']:
        return ''
    distance = np.subtract(found['like'], recorded['like'])
    error = float(np.abs(distance).max(initial=0.0)) / max(1.0, recorded['scale'])
    others = {name for name in there if here.get(name) != there[name]}
    others -= set() if recorded.get('drawn') else _OF_DRAWINGS
    if not others:
        if not recorded['like']:
            return 'other bytes'
        return f'other numbers; six of them by up to {error:.1e} of the largest'
    # Nothing is known of numbers from images that another library drew.
    if others & _OF_DRAWINGS or error <= BOUND:
        return ''
    return (
        f'six numbers differ by up to {error:.1e} (machines differ in {", ".join(sorted(others))})'
    )


# --- this machine ---------------------------------------------------------------------------------

_OF_DRAWINGS = {'mujoco', 'drawing'}
_SCENE = """
<mujoco>
  <visual><global offwidth="64" offheight="48"/></visual>
  <worldbody>
    <light pos="1 1 3"/>
    <camera name="eye" pos="0 -1 1" xyaxes="1 0 0 0 1 1"/>
    <geom type="plane" size="2 2 0.1" rgba="0.6 0.5 0.4 1"/>
    <geom type="box" size="0.1 0.2 0.1" pos="0 0 0.1" euler="10 20 30" rgba="0.8 0.2 0.1 1"/>
    <geom type="sphere" size="0.1" pos="0.3 0.1 0.2" rgba="0.1 0.3 0.9 1"/>
  </worldbody>
</mujoco>
"""


@cache
def machine() -> dict[str, str]:
    """What numbers depend on besides the code: software, and hashes of fixed arithmetic."""
    named = ('numpy', 'torch', 'onnx', 'onnxruntime', 'safetensors', 'mujoco')
    return {
        # Without the build: `+cpu` computes as the others.
        **{name: version(name).partition('+')[0] for name in named},
        'vectors': torch.backends.cpu.get_cpu_capability(),
        'arithmetic': of_bytes(b''.join(array.tobytes() for array in _arithmetic())),
        'drawing': of_bytes(_drawing().tobytes()),
    }


def _arithmetic() -> Iterator[np.ndarray]:
    """Results of what networks are made of, none of it the package's, in float32."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return random.uniform(-2, 2, shape).astype(np.float32)

    with torch.inference_mode(), one_thread():
        for rows, inner, columns in ((1, 40, 48), (9, 256, 33), (65, 64, 96), (300, 72, 128)):
            left, right = draw(rows, inner), draw(inner, columns)
            yield F.linear(torch.from_numpy(left), torch.from_numpy(right.T.copy())).numpy()
            yield left.astype(np.float64) @ right.astype(np.float64)
            yield _product(left, right)
        x = torch.from_numpy(draw(37, 72))
        for of in (torch.exp, torch.sin, torch.tanh, F.gelu, F.silu, torch.rsqrt):
            yield of(x.abs()).numpy()
        yield F.layer_norm(x, (72,)).numpy()
        yield x.softmax(dim=-1).numpy()
        heads = torch.from_numpy(draw(3, 1, 4, 33, 18))
        yield F.scaled_dot_product_attention(*heads).numpy()
        image, kernel = torch.from_numpy(draw(1, 3, 28, 42)), torch.from_numpy(draw(24, 3, 7, 7))
        yield F.conv2d(image, kernel, stride=7).numpy()
        yield F.conv2d(image, kernel, padding=3).numpy()
        yield F.interpolate(image, (21, 30), mode='bilinear', antialias=True).numpy()
        yield torch.randn(300, generator=torch.Generator().manual_seed(0)).numpy()
    yield np.exp(draw(99).astype(np.float64))


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A product, softmax and error function on ONNX Runtime."""
    steps = [('MatMul', ['x', 'w'], 'y'), ('Softmax', ['y'], 's'), ('Erf', ['s'], 'e')]
    graph = helper.make_graph(
        [helper.make_node(name, inputs, [output]) for name, inputs, output in steps],
        'arithmetic',
        [helper.make_tensor_value_info('x', TensorProto.FLOAT, left.shape)],
        [helper.make_tensor_value_info('e', TensorProto.FLOAT, None)],
        [numpy_helper.from_array(right, 'w')],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 17)], ir_version=8)
    options = SessionOptions()
    options.intra_op_num_threads = 1
    session = InferenceSession(
        model.SerializeToString(), options, providers=['CPUExecutionProvider']
    )
    return session.run(None, {'x': left})[0]


def _drawing() -> np.ndarray:
    model = mujoco.MjModel.from_xml_string(_SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = mujoco.Renderer(model, 48, 64)
    renderer.update_scene(data, 'eye')
    image = renderer.render().copy()
    renderer.close()
    return image


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch add up in the order of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- parts ----------------------------------------------------------------------------------------


def parts() -> dict[str, Maker]:
    """What makes each part, by its name."""
    found: dict[str, Maker] = {}
    for family, contract in contracts().items():
        for precision in ('float32', 'float16', 'bfloat16'):
            found[f'onnx/{family}/{precision}'] = partial(_onnx, family, precision)
        kind = contract.kind or family
        # Chunks under all settings are those of the first family of such cases.
        if kind == family or kind not in _SAMPLED:
            for path, b in batch_entries(kind):
                found[f'case/{family}/{path.stem}-{b}'] = partial(_case, family, path, b)
        for name in contract.folders() if contract.folders else ():
            found[f'folder/{family}/{name}'] = partial(_folder, family, name)
    for path in releases.HERE.glob('*/description.json'):
        found[f'folder/lerobot/{path.parent.name}'] = partial(_release, path.parent)
    for name, make in _OTHERS.items():
        found[f'folder/other/{name}'] = make
    for name, (source, condition, seed) in _LOOPS.items():
        found[f'loop/{name}'] = partial(_loop, source, condition, seed)
    for precision in QUANTISED:
        found[f'onnx/pi05/{precision}'] = partial(_quantised, precision)
    return {**found, 'bag/settings': _bag}


def entries_of(part: str, make: Maker, folder: Path) -> dict[str, Entry]:
    """Make a part; its entries by their whole names."""
    with one_thread(), redirect_stdout(StringIO()):
        return {f'{part}/{name}': entry for name, entry in make(folder).items()}


def _onnx(family: str, precision: Precision, folder: Path) -> dict[str, Entry]:
    return _graphs(tiny_onnx_bundle(family, precision) / ONNX_FOLDER)


def _quantised(precision: Precision, folder: Path) -> dict[str, Entry]:
    """A tiny pi0.5's files in few bits, whose ranges come of observations."""
    spec = tiny_spec('pi05')
    write_tiny_policy(folder / 'policy', spec)
    seen = calibration_cases(read_bundle(folder / 'policy', verify=False), OBSERVATIONS).seen
    write_onnx_once(folder / 'policy', spec, 'float32')
    quantise_onnx(folder / 'policy', spec, precision, seen, 'float32')
    return _graphs(folder / 'policy' / ONNX_FOLDER)


def _graphs(folder: Path) -> dict[str, Entry]:
    """Hashes of graphs and facts by file, without drawn numbers, and one of all files."""
    files = sorted(folder.iterdir())
    return {
        'graphs': {
            path.name: of_bytes(_form(path), 12) for path in files if path.suffix != '.data'
        },
        'files': _of_weights(*(of_bytes(path.read_bytes()) for path in files)),
    }


def _form(path: Path) -> bytes:
    """A file without the numbers of small weights, which PyTorch draws otherwise elsewhere."""
    if path.suffix != '.onnx':
        return path.read_bytes()
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.data_type not in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL):
            for field in ('raw_data', 'float_data', 'int32_data'):
                tensor.ClearField(field)
    return model.SerializeToString(deterministic=True)


def _of_weights(*hashes: str) -> Entry:
    """Weights are drawn or converted: no bytes are promised elsewhere, and no numbers are kept."""
    return {'sha256': of_bytes(' '.join(hashes).encode()), 'like': [], 'scale': 0.0}


def _case(family: str, path: Path, b: int, folder: Path) -> dict[str, Entry]:
    with torch.inference_mode():
        if family not in _SAMPLED:
            return {backend: of_numbers(_chunks(family, path, b, backend)) for backend in BACKENDS}
        case = _SAMPLED[family](path)
        return {
            backend: of_numbers([chunk for _, chunk in sampled_chunks(case, b, backend)])
            for backend in BACKENDS
        }


# Kinds of cases that have chunks under several settings.
_SAMPLED = {
    'diffusion': load_diffusion_case,
    'multi_task_dit': load_multi_task_dit_case,
    'xvla': load_xvla_case,
}


def _chunks(family: str, path: Path, b: int, backend: str) -> list[np.ndarray]:
    """Chunks of a case, those that are tied to an earlier one behind it; of tokens their logits."""
    case = contract_of(family).case(path, b)
    engine = _engine(family, case.network, len(case.pixels), case.steps, backend)
    dims, head = case.network.dims, find_family(family).head
    with closing(engine):
        if head != 'tokens':
            times = flow_times(case.steps) if head == 'flow' else np.ones(1)
            engine.set_schedule(times, -1 / case.steps)
        for camera in np.flatnonzero(case.image_mask.numpy()):
            engine.encode_image(int(camera), case.pixels[camera].numpy())
        engine.encode_prefix(case.image_mask.numpy(), _arrays(case.rows))
        engine.use_prefix(1)
        if head == 'tokens':
            logits: list[np.ndarray] = []
            length = len(case.tokens)
            tokens = write_answer(engine, length, None, lambda *of: logits.append(of[2].copy()))
            return [tokens, *logits]
        noise = torch.zeros(dims.horizon, dims.action_dim) if case.noise is None else case.noise
        found = []
        for schedule in (None, *case.tied):
            tied = case.tied[schedule] if schedule else None
            of_plan = (tied.previous, schedule, tied.overlap) if tied else ()
            given = tied_inputs(noise, case.steps, *of_plan)
            rows = _arrays(case.head)
            engine.load_step_inputs(
                StepInputs(given.x, given.row_weight, given.plan, given.plan_weight, rows)
            )
            engine.run_steps()
            found.append(engine.read_x().copy())
        return found


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors.items()}


def _engine(family: str, network: FlowNetwork, cameras: int, steps: int, backend: str) -> Any:
    """An engine of a case's network, which stays as it is."""
    tokens = find_family(family).head == 'tokens'
    if backend == 'torch':
        own = build_network(family, network.dims)
        own.load_state_dict(network.state_dict())
        own.eval().requires_grad_(False)
        return (TorchTokenEngine if tokens else TorchEngine)(own, max_rows=1)
    names = tuple(CameraSpec(f'camera_{i}') for i in range(cameras))
    folder, _ = onnx_of_network(family, network, cameras=names, denoise_steps=steps)
    return (OnnxTokenEngine if tokens else OnnxEngine)(
        family, network.dims, folder, device='cpu', precision='float32', max_rows=1, threads=1
    )


def _folder(family: str, name: str, folder: Path) -> dict[str, Entry]:
    """A folder of a family's contract, and the chunks of its observations on each backend."""
    with torch.inference_mode():
        made = contract_of(family).folders()[name](folder)
    bundle = folder / 'bundle'
    with pytest.MonkeyPatch.context() as patch:
        made.prepare(patch)
        write_export(
            plan_export(made.path, made.options, default_name='tiny'),
            bundle,
            finish=lambda target, spec: write_onnx_once(target, spec, 'float32'),
        )
        found = _contents(bundle)
        for backend in BACKENDS:
            loaded = Policy.load(bundle, backend, precision='float32', threads=1, verify=False)
            with closing(loaded) as policy:
                chunks = [policy.infer(one.seen, noise=one.noise)[0] for one in made.recorded]
            found[backend] = of_numbers([chunk.actions for chunk in chunks])
    return found


def _contents(bundle: Path) -> dict[str, Entry]:
    """Hashes of policy.yaml by field and of the whole, and those of the files that it lists."""
    text = (bundle / SPEC_FILE).read_text()
    bare = re.sub(r'\b[0-9a-f]{64}\b|(?<=exported_by: vla_runtime) [\w.]+', '', text)
    fields = {
        key: of_bytes(json.dumps(value).encode(), 8) for key, value in yaml.safe_load(bare).items()
    }
    listed = {
        name: checksum
        for name, checksum in yaml.safe_load(text)['files'].items()
        if not name.startswith(f'{ONNX_FOLDER}/')
    }
    return {
        SPEC_FILE: {**fields, 'text': of_bytes(bare.encode(), 8)},
        'files': _of_weights(json.dumps(listed)),
    }


def _exported(folder: Path, checkpoint: Path, arguments: Sequence[str]) -> dict[str, Entry]:
    """A checkpoint through the command line."""
    bundle = folder / 'bundle'
    words = ['export', str(checkpoint), '--out', str(bundle), '--name', 'tiny', *arguments]
    assert main([*words, *([] if '--onnx-precision' in words else _NO_ONNX)]) == 0
    return _contents(bundle)


_NO_ONNX = ['--onnx-precision', 'none']


def _release(release: Path, folder: Path) -> dict[str, Entry]:
    """A folder as one of LeRobot's releases wrote it; an adapter over its policy."""
    checkpoint = releases.write_folder(release, folder / 'policy')
    arguments = releases.arguments(release)
    if base := releases.described(release).get('adapter_of'):
        below = releases.write_folder(releases.HERE / base, folder / 'base')
        arguments += ['--base', str(below)]
    return _exported(folder, checkpoint, arguments)


def _openpi(folder: Path) -> dict[str, Entry]:
    tensors, statistics = folders.tiny_tensors(), folders.openpi_statistics()
    checkpoint = folders.write_openpi_folder(folder / 'policy', tensors, statistics)
    return _exported(folder, checkpoint, folders.openpi_arguments())


def _openpi_aloha(folder: Path) -> dict[str, Entry]:
    """ALOHA's two arms in the joints that pi was trained on, arms as deltas."""
    names = [f'{side}{joint}' for side in 'lr' for joint in (*range(1, 7), 'g')]
    tensors, statistics = folders.tiny_tensors(), folders.openpi_statistics(32)
    checkpoint = folders.write_openpi_folder(folder / 'policy', tensors, statistics)
    arguments = [word for word in folders.openpi_arguments(','.join(names)) if word != '--absolute']
    arguments[arguments.index('--units') + 1] = 'rad,lg=1,rg=1'
    deltas = ','.join(name for name in names if name[1] != 'g')
    return _exported(folder, checkpoint, [*arguments, '--adapt-to-pi', 'yes', '--delta', deltas])


def _lerobot_relative(folder: Path) -> dict[str, Entry]:
    checkpoint = folders.copy_lerobot_folder(folder / 'policy')
    folders.make_relative(checkpoint)
    return _exported(folder, checkpoint, folders.lerobot_arguments())


def _libero(folder: Path) -> dict[str, Entry]:
    """Steps of an end effector's pose, in shares of a controller's limits."""
    count = len(libero_folders.ACTIONS)
    checkpoint = libero_folders.write_libero_folder(
        folder / 'policy', np.zeros(count), np.full(count, 0.3)
    )
    return _exported(folder, checkpoint, [*libero_folders.OPTIONS, *libero_folders.POSE_OPTIONS])


def _groot_n15(folder: Path) -> dict[str, Entry]:
    checkpoint = groot_folders.write_groot_folder(folder / 'policy')
    names = groot_folders.JOINTS
    arguments = [
        *('--state-names', ','.join(names), '--action-names', ','.join(names[:7])),
        *('--units', 'rad', '--rate-hz', '30', '--horizon', '8', '--prompt-length', '220'),
        *('--vision-heads', '4', '--heads', 'context=4,dit=4', '--embodiment', 'so100'),
    ]
    return _exported(folder, checkpoint, arguments)


def _bitvla(folder: Path) -> dict[str, Entry]:
    path = shipped('bitvla_a')
    checkpoint = bitvla_folders.write_folder(folder / 'policy', path)
    plan = plan_export(checkpoint, bitvla_folders.options_of(path), default_name='tiny')
    write_export(plan, folder / 'bundle')
    return _contents(folder / 'bundle')


# Folders of projects and settings that no contract has.
_OTHERS: dict[str, Maker] = {
    'bitvla': _bitvla,
    'groot_n15': _groot_n15,
    'lerobot_relative': _lerobot_relative,
    'libero_poses': _libero,
    'openpi': _openpi,
    'openpi_aloha': _openpi_aloha,
}


_DEMO = _HERE.parent / 'engines' / 'demo'
_TIED = Condition(handover='rtc', rtc_mode='guided', delay_steps=3.0)
# Who makes the chunks, how, and the seed of scene, task and noise.
_LOOPS: dict[str, tuple[Callable[[], Any], Condition, int]] = {
    'demo': (partial(PolicySource, _DEMO), Condition(), 3),
    'demo_tied': (partial(PolicySource, _DEMO), _TIED, 4),
    'expert': (ExpertSource, Condition(delay_steps=3.0, variant='moving'), 5),
}


def _loop(
    make: Callable[[], Any], condition: Condition, seed: int, folder: Path
) -> dict[str, Entry]:
    source, first = make(), []

    def keep_first(step: int, chunk: Any) -> None:
        if not first:
            first.append(chunk.actions)

    with closing(TabletopWorld()) as world:
        result = run_episode(world, source, condition, seed, on_chunk=keep_first)
        state = world.state()
    end = (result.outcome, result.touched, result.steps, state.joint_rad, state.block_m)
    text = ' '.join([result.trajectory, *map(repr, end)])
    return {'commands': of_numbers(first, text, drawn=source.needs_images)}


def _bag(folder: Path) -> dict[str, Entry]:
    """Requests under settings of every kind, and in two episodes."""
    bundle = write_tiny_policy(folder / 'tiny', tiny_spec(advantage='task_newline'))
    robot = folder / 'robot.yaml'
    robot.write_text(ROBOT)
    turns = [turn for turn in first_turns() if 'samples' not in turn.settings]
    bag = record(folder / 'bag', bundle, robot, turns)
    replayed = list(Replay(read_run(BagReader(bag)), Changes(threads=1)).inferences())
    assert len(replayed) == len(turns)
    return {'chunks': of_numbers([one.chunk.actions for one in replayed])}
