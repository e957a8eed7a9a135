"""Conditions that the CUDA path must meet before its speed means anything.

Each takes a device and a size and returns a `Finding`. They run on a CPU too, without graphs, to
test their logic.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.random_policy import (
    ChunkInputs,
    denoise_chunk,
    encode,
    infer,
    layer_by_layer,
    random_inputs,
    random_network,
    sized_dims,
    torch_engine,
)

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.schema import SPEC_FILE
from vla_runtime.engines.protocol import PolicyEngine, StepInputs
from vla_runtime.engines.recorded_cases import BOUNDS as RECEIPT_BOUNDS
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.engines.torch.layer_trial import choose_layers
from vla_runtime.engines.torch.token_engine import TorchTokenEngine
from vla_runtime.engines.torch.weights import load_network
from vla_runtime.engines.triton_option import ON
from vla_runtime.family.declaration import (
    PolicyDims,
    RowInput,
    free_places,
    image_places,
    image_sizes,
    language_dims,
    token_dims,
)
from vla_runtime.family.listing import find_family
from vla_runtime.family.step_schedule import StepSchedule
from vla_runtime.inference.denoise import flow_times, usual_schedule
from vla_runtime.inference.pipeline import ChunkPipeline
from vla_runtime.inference.prefix_cache import CachePolicy, PrefixInputs
from vla_runtime.inference.request import ChunkRequest
from vla_runtime.inference.runner import ChunkRunner
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.models.blocks import epilogues
from vla_runtime.models.blocks.key_lengths import Shape, flash, usable

# Largest difference allowed, as a fraction of the reference's largest number. float32: other order
# of sums, ten steps deep. bfloat16: eight bits of mantissa in every product.
FLOAT32_BOUND = 1e-4
BFLOAT16_BOUND = 3e-2
# Two different inputs must move the chunk by more than this fraction of its largest number.
DISTINCT = 1e-2
BOUNDS = {'float32': FLOAT32_BOUND, 'bfloat16': BFLOAT16_BOUND}


@dataclass(frozen=True)
class Finding:
    """Outcome of one check; `note` is one line for people."""

    passed: bool
    note: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference as a fraction of the reference's largest number; infinite for NaN."""
    if not np.isfinite(value).all():
        return float('inf')
    return float(np.abs(value - reference).max() / np.abs(reference).max())


def keeps_bounds(worst: Mapping[str, float], bounds: Mapping[str, float] = BOUNDS) -> bool:
    """Return whether the largest error of each precision is within its bound."""
    return all(error <= bounds[precision] for precision, error in worst.items())


def worst_in_words(worst: Mapping[str, float], bounds: Mapping[str, float] = BOUNDS) -> str:
    """Return the largest error of each precision beside its bound."""
    return ', '.join(
        f'{precision} {error:.1e} (bound {bounds[precision]:.0e})'
        for precision, error in worst.items()
    )


# ACT makes a change of its inputs six times as large: in bfloat16 its chunks are off by 0.05 on a
# CPU already. A wrong mask is seen in float32.
FAMILY_BOUNDS = {'float32': 2e-4, 'bfloat16': RECEIPT_BOUNDS['bfloat16'].ceiling}
# Tokens of an answer that are read back.
_ANSWERED = 3
POLICIES = Path(__file__).parents[2] / 'vla_tools' / 'selftest' / 'policies.tar.xz'


def family_inputs(bundle: Bundle, rows: int, seed: int) -> ChunkInputs:
    """Draw inputs for a bundle's networks; of two rows the prompts differ in length."""
    spec, random = bundle.spec, np.random.default_rng(seed)
    family, dims = find_family(spec.family), bundle.spec.dims
    chunk, single = (dims.horizon, dims.action_dim), family.head == 'single'
    noise = random.standard_normal(chunk).astype(np.float32)
    plan_weight = np.zeros((spec.denoise_steps, dims.horizon), dtype=np.float32)
    if not single:
        plan_weight[:, : dims.horizon // 4] = 0.5
    step_noise = None
    if family.has_scheduler:
        step_noise = random.standard_normal((spec.denoise_steps, *chunk)).astype(np.float32)
    return ChunkInputs(
        pixels=[random.uniform(-1, 1, (3, *size)).astype(np.float32) for size in image_sizes(dims)],
        image_mask=np.ones(dims.cameras, dtype=bool),
        prefix_inputs=_draw(family.prefix_inputs(dims), dims, rows, random),
        step_inputs=StepInputs(
            # A head that runs once gets zeros for noise.
            x=np.zeros_like(noise) if single else noise,
            row_weight=np.array([2.0, -1.0] if rows == 2 else [1.0], dtype=np.float32),
            plan=random.uniform(-1, 1, chunk).astype(np.float32),
            plan_weight=plan_weight,
            rows=_draw(family.head_inputs(dims), dims, rows, random),
            step_noise=step_noise,
        ),
        schedule=usual_schedule(family, dims, spec.denoise_steps, spec.flow_times),
    )


def _draw(
    inputs: Mapping[str, RowInput], dims: PolicyDims, rows: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw a family's inputs; integers are tokens, and booleans mask prompts."""
    drawn: dict[str, np.ndarray] = {}
    for name, given in inputs.items():
        shape = (rows, *given.shape)
        if given.kind == 'int64':
            drawn[name] = random.integers(0, language_dims(dims).vocabulary, shape)
        elif given.kind == 'bool':
            # Text up to the last image is in every prompt.
            least = (image_places(dims) or (0,))[-1]
            lengths = least + (shape[-1] - least) * np.array([3, 2])[:rows] // 4
            drawn[name] = np.arange(shape[-1]) < lengths[:, None]
        else:
            drawn[name] = random.uniform(-1, 1, shape).astype(np.float32)
    return drawn


def families(device: str, size: str) -> Finding:
    """Chunks (or answer logits) of every tiny policy, for one and two rows, in two precisions.

    On CUDA every network must have been captured. The size does not matter.
    """
    figures: dict[str, float] = {}
    worst = dict.fromkeys(FAMILY_BOUNDS, 0.0)
    names: dict[str, None] = {}
    failures = []
    with tempfile.TemporaryDirectory(prefix='vla_runtime_gpu_') as temporary:
        shutil.unpack_archive(POLICIES, temporary)
        for path in sorted(Path(temporary).glob(f'*/{SPEC_FILE}')):
            bundle = read_bundle(path.parent, verify=False)
            names[bundle.spec.family] = None
            for precision in worst:
                errors, fault = _errors(bundle, device, precision)
                figures |= {f'{path.parent.name} {name}': error for name, error in errors.items()}
                worst[precision] = max(worst[precision], *errors.values())
                failures += [f'{path.parent.name} {precision}: {fault}'] if fault else []
    words = worst_in_words(worst, FAMILY_BOUNDS)
    note = f'{", ".join(names)}: largest difference from the CPU in float32: {words}'
    passed = not failures and keeps_bounds(worst, FAMILY_BOUNDS)
    return Finding(passed, '; '.join([note, *failures]), figures)


def answer_logits(engine: TorchTokenEngine, inputs: ChunkInputs) -> np.ndarray:
    """Logits of an answer's first tokens, where the same tokens are read back whatever they say."""
    encode(engine, inputs)
    engine.use_prefix(inputs.rows, 0)
    engine.begin_answer()
    logits = [engine.read_logits()]
    for place in range(min(_ANSWERED, free_places(token_dims(engine.dims)))):
        engine.read_token(np.full(inputs.rows, place + 1, dtype=np.int64), place)
        logits.append(engine.read_logits())
    return np.stack(logits)


def _errors(bundle: Bundle, device: str, precision: str) -> tuple[dict[str, float], str]:
    """Return errors by rows, and which network was not captured where it should have been."""
    family, dims = bundle.spec.family, bundle.spec.dims
    network = load_network(family, dims, bundle.weights_path, device=device, precision=precision)
    # The weights as rounded, so that what differs is the computation alone.
    rounded = load_network(family, dims, bundle.weights_path, device='cpu', precision=precision)
    tokens = find_family(family).head == 'tokens'
    run, kind = (answer_logits, TorchTokenEngine) if tokens else (infer, TorchEngine)
    engine = kind(network, use_cuda_graphs=True)
    truth = kind(rounded.float(), use_cuda_graphs=False)
    errors = {}
    for rows in (1, 2):
        inputs = family_inputs(bundle, rows, seed=rows)
        found, expected = run(engine, inputs), run(truth, inputs)
        errors[f'{precision} rows={rows}'] = relative_error(found, expected)
    status = engine.cuda_graph
    engine.close()
    truth.close()
    wanted = 'captured' if device.startswith('cuda') else 'eager'
    fault = ', '.join(f'{name} {how}' for name, how in status.items() if how != wanted)
    return errors, fault


CAMERAS = 2
SHORT_PROMPT = 10
_NAMES = ('first', 'second')


def variants(inputs: ChunkInputs) -> dict[str, ChunkInputs]:
    """The inputs for every way in which a torch engine can encode and denoise them."""
    steps = inputs.step_inputs
    changes: dict[str, dict[str, Any]] = {
        'plain': {},
        'jacobian': {'jacobian': True},
        'action_time': {'clean_actions': 2},
    }
    found = {
        name: replace(inputs, step_inputs=replace(steps, **change))
        for name, change in changes.items()
    }
    # A short prompt is encoded at a shorter length.
    given = inputs.prefix_inputs
    tokens = given['token_mask'] & (np.arange(given['token_mask'].shape[1]) < SHORT_PROMPT)
    short = replace(inputs, prefix_inputs={**given, 'token_mask': tokens})
    return {**found, 'short prompt': short}


def correctness(device: str, size: str) -> Finding:
    """Chunks of the device against those of the CPU in float32, the same weights on both."""
    figures: dict[str, float] = {}
    worst = {'float32': 0.0, 'bfloat16': 0.0}
    for family in ('pi05', 'pi0'):
        dims = sized_dims(family, size, CAMERAS)
        for precision in worst:
            network = random_network(family, dims, device, precision)
            # The weights as rounded, so that what differs is the computation alone.
            reference = random_network(family, dims, 'cpu', precision).float()
            engine = torch_engine(network, graphs=True)
            truth = torch_engine(reference, graphs=False)
            for rows in (1, 2):
                every = variants(random_inputs(dims, rows, seed=rows))
                # Each takes seconds on the CPU: all variants once.
                everything = (precision, rows) == ('float32', 1)
                for name, inputs in (every if everything else {'plain': every['plain']}).items():
                    error = relative_error(infer(engine, inputs), infer(truth, inputs))
                    figures[f'{family} {precision} rows={rows} {name}'] = error
                    worst[precision] = max(worst[precision], error)
            engine.close()
            truth.close()
    note = f'largest difference from the CPU in float32: {worst_in_words(worst)}'
    return Finding(keeps_bounds(worst), note, figures)


def triton(device: str, size: str) -> Finding:
    """Chunks with the expert in Triton kernels against the CPU in float32.

    On CUDA both families must use them; on a CPU only Triton's interpreter does.
    """
    figures: dict[str, float] = {}
    worst = dict.fromkeys(BOUNDS, 0.0)
    refused: dict[str, list[str]] = {}
    for family in ('pi05', 'pi0'):
        dims = sized_dims(family, size, CAMERAS)
        for precision in worst:
            engine = torch_engine(random_network(family, dims, device, precision), graphs=True)
            choose_layers(engine, precision, action_times=True)
            if engine.triton != ON:
                refused.setdefault(engine.why_triton, []).append(f'{family} in {precision}')
                engine.close()
                continue
            reference = random_network(family, dims, 'cpu', precision).float()
            truth = torch_engine(reference, graphs=False)
            for rows in (1, 2):
                every = variants(random_inputs(dims, rows, seed=rows))
                # The others run in the operators.
                for name in ('plain', 'action_time', 'short prompt'):
                    inputs = every[name]
                    error = relative_error(infer(engine, inputs), infer(truth, inputs))
                    figures[f'{family} {precision} rows={rows} {name}'] = error
                    worst[precision] = max(worst[precision], error)
            engine.close()
            truth.close()
    notes = [f'not taken for {", ".join(names)}: {why}' for why, names in refused.items()]
    if not figures:
        return Finding(not device.startswith('cuda'), '; '.join(notes))
    notes.insert(0, f'largest difference from the CPU in float32: {worst_in_words(worst)}')
    return Finding(keeps_bounds(worst) and not refused, '; '.join(notes), figures)


def replay_errors(
    graphed: PolicyEngine, eager: PolicyEngine, first: ChunkInputs, second: ChunkInputs
) -> dict[str, float]:
    """Compare a replaying engine with eager runs on changing inputs that share nothing.

    The second observation with the first noise is run too, so that a stale prefix cannot hide
    behind the noise. Returns `distance`, how far the observation alone moves the eager chunk, and
    relative errors: each input in turn, the first again, and both slots after both were filled.
    """
    observed = replace(second, step_inputs=first.step_inputs)
    expected = infer(eager, first)
    answers = {'first': (infer(graphed, first), expected)}
    for name, inputs in {'other observation': observed, 'other noise': second}.items():
        answers[name] = (infer(graphed, inputs), infer(eager, inputs))
    answers['first again'] = (infer(graphed, first), expected)
    encode(graphed, second, slot=1)
    answers['slot 0'] = (denoise_chunk(graphed, first, slot=0), expected)
    answers['slot 1'] = (denoise_chunk(graphed, second, slot=1), answers['other noise'][1])
    return {
        'distance': relative_error(answers['other observation'][1], expected),
        **{name: relative_error(got, wanted) for name, (got, wanted) in answers.items()},
    }


def graph_freshness(device: str, size: str) -> Finding:
    """Two inputs give two outputs, and a replay equals an eager run, for rows and variants.

    On CUDA every network must have been captured; on a CPU none.
    """
    expected_status = 'captured' if device.startswith('cuda') else 'eager'
    dims = sized_dims('pi05', size, CAMERAS)
    network = random_network('pi05', dims, device, 'bfloat16')
    graphed, eager = torch_engine(network, graphs=True), torch_engine(network, graphs=False)
    figures: dict[str, Any] = {}
    failures = []
    for rows in (1, 2):
        firsts, seconds = (variants(random_inputs(dims, rows, seed)) for seed in (10, 20))
        for name in firsts:
            errors = replay_errors(graphed, eager, firsts[name], seconds[name])
            status = dict(graphed.cuda_graph)
            label = f'rows={rows} {name}'
            figures[label] = {**errors, 'cuda_graph': status}
            distance = errors.pop('distance')
            if distance < DISTINCT:
                failures.append(f'{label}: the observation moves the chunk by {distance:.1e} only')
            # Attention's backward pass may add in any order, so no two runs need agree to the bit.
            bound = BFLOAT16_BOUND if name == 'jacobian' else 0.0
            failures += [f'{label}, {n}: off by {e:.1e}' for n, e in errors.items() if e > bound]
            failures += [f'{label}: {n} is {s}' for n, s in status.items() if s != expected_status]
    graphed.close()
    eager.close()
    return Finding(
        not failures,
        '; '.join(failures)
        or f'replay equals eager bit for bit, slots kept apart; all {expected_status}',
        figures,
    )


def guidance(device: str, size: str) -> Finding:
    """Fused and serial guidance against the velocities combined in float64 on the host."""
    dims = sized_dims('pi05', size, CAMERAS)
    network = random_network('pi05', dims, device, 'float32')
    engine = torch_engine(network, graphs=True)
    pair = random_inputs(dims, 2, seed=3)
    alone = random_inputs(dims, 1, seed=3)
    # No plan here: what is checked is the sum over rows alone.
    no_plan = np.zeros_like(pair.step_inputs.plan_weight)
    pair = replace(pair, step_inputs=replace(pair.step_inputs, plan_weight=no_plan))
    alone = replace(alone, step_inputs=replace(alone.step_inputs, plan_weight=no_plan))
    fused = infer(engine, pair)
    serial = serial_chunk(engine, pair, alone)
    conditioned = infer(engine, alone)
    figures = {
        'per-step identity': identity_error(engine, pair),
        'fused against serial': relative_error(fused, serial),
        'guided against conditioned': relative_error(fused, conditioned),
    }
    engine.close()
    passed = (
        figures['per-step identity'] <= FLOAT32_BOUND
        and figures['fused against serial'] <= FLOAT32_BOUND
        and figures['guided against conditioned'] >= DISTINCT
    )
    note = (
        f'x[k+1] = x[k] + dt sum(w v) to {figures["per-step identity"]:.1e}, fused equals serial '
        f'to {figures["fused against serial"]:.1e} (bound {FLOAT32_BOUND:.0e}); guidance moves '
        f'the chunk by {figures["guided against conditioned"]:.1e}'
    )
    return Finding(passed, note, figures)


def identity_error(engine: PolicyEngine, inputs: ChunkInputs) -> float:
    """Largest relative error of x[k+1] = x[k] + dt sum(w v) in float64, over all steps."""
    encode(engine, inputs)
    steps = len(inputs.step_inputs.plan_weight)
    engine.use_prefix(inputs.rows)
    engine.set_schedule(flow_times(steps), -1.0 / steps)
    engine.load_step_inputs(inputs.step_inputs)
    weights = inputs.step_inputs.row_weight.astype(np.float64)[:, None, None]
    worst = 0.0
    for index in range(steps):
        before = engine.read_x().astype(np.float64)
        engine.step(index)
        moved = before - (weights * engine.read_velocity()).sum(axis=0) / steps
        worst = max(worst, relative_error(engine.read_x(), moved))
    return worst


def serial_chunk(engine: PolicyEngine, pair: ChunkInputs, alone: ChunkInputs) -> np.ndarray:
    """The guided chunk from two single-row passes a step, combined and moved in float64."""
    for row in (0, 1):
        one = replace(
            pair,
            prefix_inputs={
                name: array[row : row + 1] for name, array in pair.prefix_inputs.items()
            },
        )
        encode(engine, one, slot=row)
    steps = len(pair.step_inputs.plan_weight)
    engine.use_prefix(1, 0)
    engine.set_schedule(flow_times(steps), -1.0 / steps)
    engine.load_step_inputs(alone.step_inputs)
    x = pair.step_inputs.x.astype(np.float64)
    for index in range(steps):
        velocity = np.zeros_like(x)
        for row, weight in enumerate(pair.step_inputs.row_weight.astype(np.float64)):
            engine.use_prefix(1, row)
            engine.write_x(x.astype(np.float32))
            engine.step(index)
            velocity += weight * engine.read_velocity()[0]
        x -= velocity / steps
    return x


def overlap(device: str, size: str, requests: int = 12) -> Finding:
    """Chunks of the pipeline, encoding and denoising at once, against one after the other.

    Denoise steps change in the middle: a graph is captured in one thread while the other encodes.
    """
    expected_status = 'captured' if device.startswith('cuda') else 'eager'
    dims = sized_dims('pi05', size, CAMERAS)
    network = random_network('pi05', dims, device, 'bfloat16')
    wanted = [
        chunk_request(random_inputs(dims, rows=1 + n % 2, seed=n, steps=10 if n < 6 else 7))
        for n in range(requests)
    ]
    engine = torch_engine(network, graphs=False)
    runner = ChunkRunner(engine, _NAMES)
    expected = []
    for request in wanted:
        expected.append(runner.denoise(runner.encode(request)).chunk.copy())
    engine.close()

    engine = torch_engine(network, graphs=True)
    pipeline: ChunkPipeline[tuple[np.ndarray, float]] = ChunkPipeline(ChunkRunner(engine, _NAMES))
    try:
        futures = [
            pipeline.submit(request, lambda _, denoised, ms: (denoised.chunk.copy(), ms))
            for request in wanted
        ]
        results = [future.result() for future in futures]
        status = dict(engine.cuda_graph)
    finally:
        # Cut off for its time, it must not run on beside what is measured next.
        pipeline.close()
        engine.close()
    pairs = zip(results, expected, strict=True)
    worst = max(relative_error(chunk, wanted) for (chunk, _), wanted in pairs)
    figures = {
        'worst error': worst,
        'overlap ms': [milliseconds for _, milliseconds in results],
        'cuda_graph': status,
    }
    passed = worst == 0.0 and set(status.values()) == {expected_status}
    together = sum(milliseconds > 0.0 for _, milliseconds in results)
    note = (
        f'{together} of {requests} encodings overlapped; largest difference {worst:.1e}; '
        f'{", ".join(f"{name} {how}" for name, how in status.items())}'
    )
    return Finding(passed, note, figures)


def chunk_request(inputs: ChunkInputs) -> ChunkRequest:
    """The inputs as the policy's runner takes them, without any cache."""
    prefix = PrefixInputs(
        pixels=inputs.pixels,
        image_mask=inputs.image_mask,
        rows=inputs.prefix_inputs,
        words='',
        state_bins=np.zeros(0, dtype=np.int64),
        time_s=0.0,
    )
    steps = len(inputs.step_inputs.plan_weight)
    return ChunkRequest(
        settings=PolicySettings(cache=CachePolicy(mode='off')),
        number=0,
        prefixes=(prefix,),
        schedule=StepSchedule(flow_times(steps), -1.0 / steps),
        inputs=inputs.step_inputs,
        guidance='fused' if inputs.rows == 2 else 'none',
        rtc_mode='guided',
        noise=inputs.step_inputs.x,
    )


def allocated_bytes(device: str, *, no_engine: bool = False) -> int:
    """Bytes in tensors on the device now; with `no_engine` without cuBLAS's scratch memory.

    PyTorch keeps one scratch buffer a stream until no captured graph holds its address.
    """
    gc.collect()
    if device.startswith('cuda'):
        if no_engine:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device)
    # type() and not isinstance(): some objects run code when asked for their class, and tensors of
    # other classes (of a traced graph) have no memory.
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [o for o in gc.get_objects() if type(o) in kinds and not o.is_meta]
    # Tensors in oneDNN's layout have no storage.
    packed = [t.numel() * t.element_size() for t in tensors if t.is_mkldnn]
    storages = [t.untyped_storage() for t in tensors if not t.is_mkldnn]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values()) + sum(packed)


def allocations(device: str) -> int:
    """Allocations on the device since the process began, freed ones too; 0 on a CPU."""
    if not device.startswith('cuda'):
        return 0
    return int(torch.cuda.memory_stats(device)['allocation.all.allocated'])


def memory(device: str, size: str, chunks: int = 20) -> Finding:
    """Steady state allocates nothing, and `close` gives everything back."""
    before = allocated_bytes(device, no_engine=True)
    figures = _memory_of_an_engine(device, size, chunks)
    left = allocated_bytes(device, no_engine=True) - before
    note = (
        f'{2 * chunks} chunks made {figures["allocations"]} allocations on the device and grew it '
        f'by {figures["growth bytes"]} bytes; {left} bytes are left after close'
    )
    passed = figures['growth bytes'] <= 0 and figures['allocations'] == 0 and left <= 0
    return Finding(passed, note, {**figures, 'left after close bytes': left})


def _memory_of_an_engine(device: str, size: str, chunks: int) -> dict[str, int]:
    dims = sized_dims('pi05', size, CAMERAS)
    engine = torch_engine(random_network('pi05', dims, device, 'bfloat16'), graphs=True)
    inputs = [random_inputs(dims, rows, seed=rows) for rows in (1, 2)]

    def growth(rounds: int) -> int:
        start = allocated_bytes(device)
        for _ in range(rounds):
            for one in inputs:
                infer(engine, one)
        return allocated_bytes(device) - start

    warm_up = growth(1)
    # Looking at the memory allocates nothing either.
    before = allocations(device)
    grown = growth(chunks)
    made = allocations(device) - before
    engine.close()
    return {'warm-up bytes': warm_up, 'growth bytes': grown, 'allocations': made}


def packed_keys(device: str, size: str) -> Finding:
    """Attention by lengths against the layers one by one on the same device, in bfloat16.

    On CUDA the kernel must be usable, at published sizes too; on a CPU not.
    """
    expected = device.startswith('cuda')
    usable_at = {name: _usable(device, name) for name in ('pi05', 'smolvla')}
    network = random_network('pi05', sized_dims('pi05', size, CAMERAS), device, 'bfloat16')
    packed = torch_engine(network, graphs=True)
    taken = packed._network.kernel is not None
    plain = torch_engine(layer_by_layer(network, 'pi05'), graphs=False)
    errors = {}
    for rows in (1, 2):
        every = variants(random_inputs(network.dims, rows, seed=rows))
        # The prompts differ in length: what was captured with one runs with the next.
        for name in ('plain', 'short prompt'):
            found, wanted = infer(packed, every[name]), infer(plain, every[name])
            errors[f'rows={rows} {name}'] = relative_error(found, wanted)
    packed.close()
    plain.close()
    worst = max(errors.values())
    passed = worst <= BFLOAT16_BOUND and {taken, *usable_at.values()} == {expected}
    note = (
        f'the kernel that takes lengths is {"used" if taken else "not used"}; largest difference '
        f'from the layers one by one {worst:.1e} (bound {BFLOAT16_BOUND:.0e})'
    )
    return Finding(passed, note, {**errors, 'taken': taken, 'usable': usable_at})


def _usable(device: str, name: str) -> bool:
    """True if the kernel can serve the steps of the published policy of this name."""
    dims: Any = find_family(name).presets[name]
    own = dims.horizon if name == 'pi05' else 0
    expert = dims.expert
    heads = expert.num_heads, expert.num_kv_heads, expert.head_dim
    shape = Shape(dims.horizon, own + dims.prefix_length, *heads).folded
    return usable(flash, torch.device(device), torch.bfloat16, shape) is not None


def products(device: str, size: str) -> Finding:
    """Products of vision and prefix that take GELU or the residual stream along, in bfloat16.

    On CUDA all published sizes must be usable; on a CPU none. The size does not matter.
    """
    figures = {}
    for name in ('pi05', 'smolvla'):
        dims: Any = find_family(name).presets[name]
        vision, language = dims.vision, dims.language
        heads = language.num_heads * language.head_dim
        wanted_shapes = [
            (epilogues.gelu, (vision.tokens, vision.mlp_dim, vision.width)),
            (epilogues.add, (dims.prefix_length, language.width, heads)),
            (epilogues.add, (dims.prefix_length, language.width, language.mlp_dim)),
        ]
        if name == 'pi05':
            # SmolVLA's gates have another activation.
            gate = dims.prefix_length, language.mlp_dim, language.width
            wanted_shapes.append((epilogues.gelu, gate))
        for wanted, shape in wanted_shapes:
            found = epilogues.usable(wanted, torch.device(device), torch.bfloat16, shape)
            figures[f'{name} {wanted.__name__} {shape}'] = found is not None
    used = sum(figures.values())
    passed = used == (len(figures) if device.startswith('cuda') else 0)
    note = f'{used} of {len(figures)} products take the next operation along'
    return Finding(passed, note, figures)


# The most important come first, as time may run out.
CHECKS: dict[str, Callable[[str, str], Finding]] = {
    'correctness': correctness,
    'families': families,
    'graph freshness': graph_freshness,
    'guidance': guidance,
    'packed keys': packed_keys,
    'products': products,
    'overlap': overlap,
    'memory': memory,
    # Last: an out-of-bounds write of a kernel breaks the process.
    'triton': triton,
}
