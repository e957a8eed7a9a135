"""The receipt of built engines: the loaded engine against what PyTorch gave in float32.

The cases are those of the export (`engines.recorded_cases`), so PyTorch is not needed. They run as
in the policy: vision and prefix in sequence; every step alone from PyTorch's x; x from the noise
on (its growth); and the captured chunk. Bounds are those of the ONNX files (`receipt`).
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from vla_convert.export.receipt import ChunkComparison, Comparison, Receipt, left_out_of_int8
from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, Precision, read_graph_facts
from vla_runtime.engines.closing import close_on_error
from vla_runtime.engines.recorded_cases import Case, error_of, judged_as, read_cases
from vla_runtime.engines.tensorrt.engine import TensorRTEngine
from vla_runtime.engines.tensorrt.store import (
    METADATA,
    RECEIPT,
    REJECTION,
    EngineFile,
    Metadata,
    passed_on,
    write_metadata,
)
from vla_runtime.engines.tensorrt.token_engine import TensorRTTokenEngine, engine_class
from vla_runtime.family.listing import find_family
from vla_runtime.files.atomic_write import file_sha256, write_text
from vla_runtime.files.json_file import JsonError, read_json
from vla_runtime.inference.denoise import case_schedule
from vla_runtime.inference.recorded_check import read_back

# --- Receipt files: `verification.json` lists the SHA-256 of the compared engines, weights and
# cases; nothing loads engines that `engine.json` does not call passed (`store`). `rejected.json`
# has the findings on engines with wrong numbers, which are removed.

Engines = Mapping[str, EngineFile]


def compared_files(folder: Path, engines: Engines, files: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of compared files, engines, weights and cases, by policy.yaml's names."""
    digests = {entry.file: file_sha256(folder / entry.file) for entry in engines.values()}
    return {**passed_on(files), **digests}


def is_compared(folder: Path, engines: Engines, files: Mapping[str, str]) -> bool:
    """Return whether the folder's receipt covers these very engines; arguments as above."""
    try:
        compared = read_json(folder / RECEIPT).mapping('files').values.items()
    except JsonError:
        return False
    # More may be in it: engines for two rows that were removed since.
    return bool(compared_files(folder, engines, files).items() <= compared)


def keep(
    folder: Path, metadata: Metadata, document: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    """Write the receipt of engines that passed the comparison, and let them be loaded."""
    _write(folder / RECEIPT, document)
    write_metadata(folder, replace(metadata, passed=passed_on(files)))


def reject(
    folder: Path, engines: Engines, document: Mapping[str, Any], failures: list[str]
) -> None:
    """Remove engines with wrong numbers, `engine.json` first, and record the comparison."""
    (folder / METADATA).unlink()
    forget(folder)
    _write(folder / REJECTION, {'failures': failures, **document})
    for entry in engines.values():
        (folder / entry.file).unlink()


def forget(folder: Path) -> None:
    """Remove receipt and rejection of engines that are about to be replaced."""
    for name in (RECEIPT, REJECTION):
        (folder / name).unlink(missing_ok=True)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(document, indent=1) + '\n')


def verify_built(
    bundle: Bundle,
    metadata: Metadata,
    *,
    device: str,
    advance: Callable[[int], object] = lambda count: None,
) -> Receipt:
    """Load the engines that were built on this machine and compare them with recorded cases.

    `device`: `cuda` or `cuda:N`; `advance` gets 1 after each case. Raises ValueError: no recorded
    cases, or as `TensorRTEngine.load`.
    """
    cases, facts = read_cases(bundle.folder)
    cases = [case for case in cases if case.rows <= metadata.rows]
    engine = engine_class(bundle.spec.family).load(
        bundle.folder,
        bundle.spec.family,
        bundle.spec.dims,
        files=bundle.spec.files,
        device=device,
        precision=metadata.precision,
        max_rows=metadata.rows,
        denoise_steps=bundle.spec.denoise_steps,
        use_cuda_graphs=True,
        passed=False,
    )
    with close_on_error(engine.close):
        beside = read_graph_facts(bundle.folder / ONNX_FOLDER, ()).beside
        rounds = find_family(bundle.spec.family).rounds_activations
        judged = judged_as(metadata.precision, rounds)
        receipt = _compare(cases, facts, metadata, judged, beside, engine, advance)
    engine.close()
    return receipt


def receipt_dict(receipt: Receipt, metadata: Metadata, files: Mapping[str, str]) -> dict[str, Any]:
    """Contents of the engines' verification.json; `files` is from `compared_files`."""
    return {
        'what': 'the built engines against what the PyTorch modules gave in float32 at export, on '
        'recorded inputs, each network fed with what the one before it gave',
        'files': dict(files),
        'precision': receipt.precision,
        'gpu': metadata.gpu,
        'versions': {
            'python': platform.python_version(),
            'tensorrt': metadata.tensorrt,
            'numpy': np.__version__,
        },
        **receipt.figures(),
    }


def _compare(
    cases: list[Case],
    facts: Mapping[str, Any],
    metadata: Metadata,
    judged: str,
    beside: Precision,
    engine: TensorRTEngine,
    advance: Callable[[int], object],
) -> Receipt:
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    chunks = []
    for number, case in enumerate(cases):
        for place, error in _networks(engine, case).items():
            errors.setdefault(place, []).append(error)
        if 'answer' in case.reference:
            error, growth = _answer(cast(TensorRTTokenEngine, engine), case)
        else:
            for name, error in _single_steps(engine, case).items():
                errors.setdefault((f'expert, {case.rows} row(s)', name), []).append(error)
            growth = _growth(engine, case)
            engine.load_step_inputs(case.step_inputs)
            engine.run_steps()
            error = error_of(engine.read_x(), case.reference['trace'][-1][0])
        chunks.append(
            ChunkComparison.of('engines', 'engines', number, case.gain, error, growth, judged)
        )
        advance(1)
    tensors = [
        Comparison.of(network, tensor, found, judged) for (network, tensor), found in errors.items()
    ]
    status = ', '.join(f'{name} {state}' for name, state in engine.cuda_graph.items())
    return Receipt(
        metadata.precision,
        f'{metadata.gpu} (TensorRT {metadata.tensorrt})',
        [case.words for case in cases],
        tensors,
        chunks,
        [
            f'CUDA graphs: {status}',
            f'recorded by PyTorch {facts.get("torch")}',
            *left_out_of_int8(metadata.precision, beside),
        ],
    )


def _answer(engine: TensorRTTokenEngine, case: Case) -> tuple[tuple[float, float], list[float]]:
    """Read the recorded tokens back; return the error of all logits, and of each token's."""
    found, expected = read_back(engine, case), case.reference['logits']
    growth = [error_of(*pair)[0] for pair in zip(found, expected, strict=True)]
    return error_of(found, expected), growth


def _networks(engine: TensorRTEngine, case: Case) -> dict[tuple[str, str], tuple[float, float]]:
    """Encode, and compare what vision and prefix left in their buffers."""
    for camera, pixels in enumerate(case.pixels):
        engine.encode_image(camera, pixels)
    engine.encode_prefix(case.image_mask, case.prefix_inputs)
    engine.use_prefix(case.rows)
    found = case.sampled(engine.read_image_tokens(), engine.read_prefix())
    return {
        (
            'vision' if name == 'image_tokens' else f'prefix, {case.rows} row(s)',
            name,
        ): error_of(found[name], expected)
        for name, expected in case.samples.items()
    }


def _single_steps(engine: TensorRTEngine, case: Case) -> dict[str, tuple[float, float]]:
    """Every step alone, from PyTorch's x before it."""
    trace, steps = case.reference['trace'], len(case.plan_weight)
    engine.set_schedule(*case_schedule(case, engine.dims))
    engine.load_step_inputs(case.step_inputs)
    following, velocities = [], []
    for index in range(steps):
        engine.write_x(trace[index][0])
        engine.step(index)
        following.append(engine.read_x()[None])
        velocities.append(engine.read_velocity())
    return {
        'x_next': error_of(np.stack(following), trace[1:]),
        'velocity': error_of(np.stack(velocities), case.reference['velocity']),
    }


def _growth(engine: TensorRTEngine, case: Case) -> list[float]:
    """The largest error of x after each step, starting from the noise."""
    engine.load_step_inputs(case.step_inputs)
    growth = []
    for index in range(len(case.plan_weight)):
        engine.step(index)
        growth.append(error_of(engine.read_x(), case.reference['trace'][index + 1][0])[0])
    return growth
