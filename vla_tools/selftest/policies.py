"""Tiny random policies of every family, on which a machine is tried without a bundle of its own.

`policies.tar.xz` has bundles with ONNX files and PyTorch's float32 CPU chunks (made by
make_policies.py in test/tools/selftest), so numpy alone can compare. A float32 one has the
family's name; others have a lower precision, and heads wide enough for fused attention.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from lzma import LZMAError
from pathlib import Path
from time import perf_counter

import numpy as np

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, PRECISIONS, Precision, read_graph_facts
from vla_runtime.bundle.schema import SPEC_FILE
from vla_runtime.engines.recorded_cases import BOUNDS
from vla_runtime.family.declaration import image_sizes
from vla_runtime.family.listing import family_names
from vla_runtime.policy import Policy
from vla_runtime.types import InferenceReport, Observation

ARCHIVE = Path(__file__).with_name('policies.tar.xz')
REFERENCE = '{name}.npz'
# Largest difference of a chunk from PyTorch's, as a fraction of its largest action if above
# 1. Rounding gives 1e-6 to 1e-5; a wrong mask, a stale graph or TF32 gives 1e-2 and more.
BOUND = 1e-3
_SEEDS = (1, 2)
_BETAS = {'plain': 1.0, 'guided': 2.0}
_TIMED = 20


def tried_families() -> tuple[str, ...]:
    """Return the families that the archive has a policy of; OSError: missing or damaged."""
    try:
        with tarfile.open(ARCHIVE) as archive:
            members = {name.removeprefix('./') for name in archive.getnames()}
    except (tarfile.TarError, EOFError, LZMAError) as error:
        raise OSError(f'{ARCHIVE}: cannot be read: {error}') from None
    return tuple(name for name in family_names() if REFERENCE.format(name=name) in members)


def unpack(folder: Path) -> None:
    """Unpack all policies into a folder; OSError: the archive is missing, or the disk is full."""
    shutil.unpack_archive(ARCHIVE, folder)


def names_of(
    folder: Path,
    families: Sequence[str],
    capability: tuple[int, int],
    precisions: Collection[str] = PRECISIONS,
) -> list[str]:
    """Return the unpacked policies to try, float32 first; bfloat16 needs capability (8, 0)."""
    if capability < (8, 0):
        return list(families)
    bundles = [path.parent for path in sorted(folder.glob(f'*/{SPEC_FILE}'))]
    lower = [
        bundle.name
        for bundle in bundles
        if read_bundle(bundle, verify=False).spec.family in families
        and precision_of(bundle) in {*precisions} - {'float32'}
    ]
    return [*families, *lower]


def precision_of(bundle: Path) -> Precision:
    """Return the precision of a policy's ONNX files."""
    return read_graph_facts(bundle / ONNX_FOLDER, ()).precision


def read_policy(folder: Path, name: str) -> tuple[Bundle, dict[str, np.ndarray]]:
    """Return an unpacked policy, its files compared with their SHA-256, and PyTorch's chunks."""
    with np.load(folder / REFERENCE.format(name=name)) as file:
        return read_bundle(folder / name), dict(file)


def infer_cases(policy: Policy) -> dict[str, np.ndarray]:
    """Infer on two inputs, plain and guided if tagged; return chunks (horizon, actions) by case."""
    chunks = {}
    for name, beta in _BETAS.items():
        if beta != 1.0 and policy.spec.advantage is None:
            continue
        settings = replace(policy.settings, cfg_beta=beta)
        policy.reset()
        for seed in _SEEDS:
            chunk, _ = policy.infer(_observation(policy, seed), settings=settings)
            chunks[f'{name}_{seed}'] = np.asarray(chunk.actions)
    return chunks


def largest_error(
    chunks: dict[str, np.ndarray],
    reference: dict[str, np.ndarray],
    precision: str = 'float32',
) -> float:
    """Return the largest difference of any case, relative to its largest action if above 1.

    Raises ValueError, naming the case: not finite, equal chunks of two inputs, or an error above
    `BOUND` (in bfloat16 that of receipts).
    """
    bound = BOUND if precision == 'float32' else BOUNDS[precision].chunk
    errors = {}
    for case, expected in reference.items():
        found = chunks[case]
        if not np.isfinite(found).all():
            raise ValueError(f'case {case}: actions that are not finite')
        scale = max(1.0, float(np.abs(expected).max()))
        errors[case] = float(np.abs(found - expected).max()) / scale
    for kind in _BETAS:
        cases = [f'{kind}_{seed}' for seed in _SEEDS]
        if cases[0] in reference and np.array_equal(chunks[cases[0]], chunks[cases[1]]):
            raise ValueError(f'case {kind}: two different inputs give the same chunk')
    worst = max(errors, key=lambda case: errors[case])
    if errors[worst] > bound:
        raise ValueError(
            f"case {worst}: actions differ from PyTorch's in float32 by {errors[worst]:.2g}, bound "
            f'{bound:g}'
        )
    return errors[worst]


def time_inferences(policy: Policy) -> tuple[float, InferenceReport]:
    """Return the median time of an inference with new images, ms, and the last one's report."""
    observations = [_observation(policy, seed) for seed in _SEEDS]
    seconds = []
    for number in range(_TIMED):
        start = perf_counter()
        _, report = policy.infer(observations[number % len(observations)])
        seconds.append(perf_counter() - start)
    return float(np.median(seconds)) * 1e3, report


def _observation(policy: Policy, seed: int) -> Observation:
    random = np.random.default_rng(seed)
    spec = policy.spec
    # Images of any size are resized, unless the network takes them as they are.
    plain = spec.images.resample == 'none'
    sizes = image_sizes(spec.dims) if plain else ((48, 64),) * len(spec.camera_names)
    return Observation(
        images={
            name: random.integers(0, 256, (*size, 3), dtype=np.uint8)
            for name, size in zip(spec.camera_names, sizes, strict=False)
        },
        state=random.uniform(-1, 1, len(policy.spec.state)).astype(np.float32),
        instruction='pick up the red cup' if seed == _SEEDS[0] else 'open the drawer',
    )
