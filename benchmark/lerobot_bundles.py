"""Bundles of LeRobot's folder, and our policies loaded from them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lerobot_checkpoint import JOINTS, Options
from lerobot_sides import OURS, look, observation

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import Precision
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.checkpoints.options import ExportOptions
from vla_runtime.export.conversion import plan_export, write_export
from vla_runtime.export.onnx.bundle import export_bundle
from vla_runtime.export.onnx.export import write_onnx
from vla_runtime.policy import Policy

# Of the networks at the sizes for a CPU, where no file of the folder has them.
_HEADS: dict[str, dict[str, Any]] = {'mid': {'vision_heads': 6}, 'tiny': {'vision_heads': 6}}
# Observations that int8 is calibrated on; the rounds have others.
_CALIBRATION = range(1000, 1020)


def export(options: Options, bundle: Path, precision: Precision | None) -> Path:
    """Make a bundle with ONNX files in this precision, or without any, unless it is there."""
    if bundle.exists():
        return bundle
    names = tuple(f'joint_{i}' for i in range(JOINTS[options.family]))
    named = ExportOptions(
        state_names=names,
        action_names=names,
        units=('rad',),
        rate_hz=30.0,
        deltas=(),
        tokenizer=Path(options.tokenizer) if options.tokenizer else None,
        **_HEADS.get(options.size, {}),
    )

    def finish(folder: Path, spec: BundleSpec) -> None:
        if precision is not None:
            write_onnx(folder, spec, precision)

    plan = plan_export(Path(options.folder), named, default_name=f'random {options.family}')
    write_export(plan, bundle, finish=finish)
    return bundle


def export_reduced(bundle: Path, target: Path, precision: Precision) -> Path:
    """Make the bundle's files in bfloat16 or int8 with their receipt, unless they are there."""
    if target.exists():
        return target
    read, observations = read_bundle(bundle), None
    if precision == 'int8':
        looks = (look(read.spec.family, seed, read.spec) for seed in _CALIBRATION)
        observations = [observation(arrays, read.spec) for arrays in looks]
    return export_bundle(read, target, precision, observations=observations)


def load_ours(names: Sequence[str], options: Options, sides: str) -> dict[str, Policy]:
    """Export what these need beside LeRobot's folder, and load them.

    Args:
        names: columns of `OURS[sides]`.
        options: options of LeRobot's folder; device and threads are ours, too.
        sides: 'cpu' or 'cuda'.
    """
    chosen = {name: OURS[sides][name] for name in names}
    checkpoint = Path(options.folder)
    onnx = any(one.backend in ('onnxruntime', 'auto') for one in chosen.values())
    bundle = checkpoint.with_name(f'{checkpoint.name}_bundle')
    export(options, bundle, 'float32' if onnx else None)
    folders = dict.fromkeys(('float32', 'bfloat16'), bundle)
    reduced: tuple[tuple[str, Precision], ...] = (('int8', 'int8'), ('auto', 'bfloat16'))
    for asked, precision in reduced:
        if any(one.precision == asked for one in chosen.values()):
            target = checkpoint.with_name(f'{checkpoint.name}_{precision}')
            folders[asked] = export_reduced(bundle, target, precision)
    gc.collect()
    return {
        name: Policy.load(
            folders[one.precision],
            one.backend,
            options.device,
            precision=one.precision,
            threads=options.threads,
            triton=one.triton,
            verify=False,
        )
        for name, one in chosen.items()
    }


def without_refused(
    ours: dict[str, Policy], sides: str
) -> tuple[dict[str, Policy], dict[str, str]]:
    """Close policies whose Triton kernels were refused at load; return the others, and why.

    They would run what another column runs.
    """
    left_out = {
        name: policy.why
        for name, policy in ours.items()
        if policy.triton != OURS[sides][name].triton
    }
    for name in left_out:
        ours[name].close()
    return {name: policy for name, policy in ours.items() if name not in left_out}, left_out
