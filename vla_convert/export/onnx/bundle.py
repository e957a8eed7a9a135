"""Writes ONNX files into a bundle; they are kept only if they agree with PyTorch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.receipt import Receipt, VerificationError
from vla_runtime import __version__
from vla_runtime.bundle.folder import Bundle, BundleError, read_bundle
from vla_runtime.bundle.onnx_files import (
    ONNX_FOLDER,
    QUANTISED,
    Attention,
    Precision,
    graph_path,
    read_graph_facts,
)
from vla_runtime.bundle.schema import ENGINES_FOLDER, SPEC_FILE, VERIFICATION_FILE, BundleSpec
from vla_runtime.bundle.writer import new_bundle, seal
from vla_runtime.engines.devices import check_int8
from vla_runtime.engines.preflight import COMPARISON_PACKAGES, missing_package
from vla_runtime.files.json_file import read_json
from vla_runtime.files.quotes import size_text
from vla_runtime.types import Observation

if TYPE_CHECKING:
    from vla_convert.export.onnx.calibration import CalibrationCases

# Least and most numbers of a head that TensorRT for RTX 1.7 has a fused kernel for, in both halves,
# on 8.6, 8.9 and 12.0.
FUSED_HEADS = (9, 256)
# (task, total) to a function that takes progress: bytes for `write onnx`, files for `verify`.
Bars = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
Report = Callable[[Receipt], object]


def no_bars(task: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda count: None)


def check_packages() -> None:
    """Refuse an export without PyTorch, `onnx` or `onnxruntime` (ExportError), importing none."""
    if missing := missing_package(*COMPARISON_PACKAGES):
        raise ExportError(
            f"ONNX files need the Python package '{missing}', which is not installed: "
            'pip install onnx onnxruntime torch, or leave them out with --onnx-precision none'
        )


def no_report(receipt: Receipt) -> None:
    """Report nothing."""


def add_onnx(
    folder: Path,
    spec: BundleSpec,
    precision: Precision,
    bars: Bars = no_bars,
    report: Report = no_report,
    cases: CalibrationCases | None = None,
    beside: Precision = 'float32',
    attention: Attention = 'exact',
) -> None:
    """Write a bundle's ONNX files, recorded cases and receipt, before it is sealed.

    The receipt is added to verification.json under `onnx`.

    Args:
        report: gets the receipt once all errors are within the bounds.
        cases: from observations, for 8 bits.
        beside: precision of the large matrices that 8 bits leave out.

    Raises ExportError: `onnx` or `onnxruntime` is not installed, the disk has not enough room, or
    verification.json is not a mapping; VerificationError: the files differ from PyTorch beyond the
    bounds; names the tensors.
    """
    check_packages()

    from vla_convert.export.onnx.cases import record_cases
    from vla_convert.export.onnx.export import onnx_bytes, write_onnx
    from vla_convert.export.onnx.verification import receipt_dict, verification_steps, verify_onnx

    known = _known_receipts(folder)
    size = onnx_bytes(spec, precision)
    _check_room(folder, size)
    # 8 bits are calibrated in float32.
    first: Precision = 'float32' if precision in QUANTISED else precision
    with bars('write onnx', size) as advance:
        # Ranges are those of what is exact.
        form = 'exact' if precision in QUANTISED else attention
        write_onnx(folder, spec, first, attention=form, advance=advance)
    if precision in QUANTISED:
        from vla_convert.export.onnx.quantised import quantise_onnx, quantised_steps

        assert cases is not None
        with bars('quantise', quantised_steps(spec)) as advance:
            quantise_onnx(
                folder,
                spec,
                precision,
                cases.seen,
                beside,
                attention=attention,
                advance=advance,
            )
    with bars('verify', verification_steps()) as advance:
        receipt = verify_onnx(
            folder,
            spec,
            advance=advance,
            keep=partial(record_cases, folder, spec),
            cases=None if cases is None else cases.held,
        )
    _check_receipt(receipt, precision)
    report(receipt)
    document = {**known, 'onnx': receipt_dict(receipt)}
    path = folder / VERIFICATION_FILE
    path.write_text(json.dumps(document, indent=1) + '\n', encoding='utf-8')


def check_attention(attention: Attention, precision: Precision, spec: BundleSpec) -> None:
    """Refuse fused attention in float32, or with heads that no kernel has (ExportError).

    `precision`: of the products that 8 bits leave out, else of all.
    """
    if attention == 'fused' and precision == 'float32':
        raise ExportError(
            'fused attention is computed in half, and TensorRT has no kernel of it in float32: '
            'take --onnx-precision bfloat16 or float16, or in 8 bits --beside-int8 bfloat16; or '
            'leave --attention out'
        )
    if attention == 'fused':
        from vla_convert.export.onnx.export import head_sizes

        least, most = FUSED_HEADS
        wrong = [
            f'those of {network} have {size}'
            for network, sizes in head_sizes(spec, precision).items()
            for size in sorted(sizes)
            if not least <= size <= most
        ]
        if wrong:
            raise ExportError(
                f'TensorRT has kernels of fused attention for heads of {least} to {most} numbers, '
                f'and {", ".join(wrong)}: take --attention exact'
            )


def _check_room(folder: Path, size: int) -> None:
    """Refuse a disk with less room than so many bytes (ExportError)."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ExportError(
            f'{size_text(size)} of ONNX weights do not fit on this disk, which has '
            f'{size_text(free)} left: make room, name a folder on another disk with --out, or '
            'choose a smaller --onnx-precision'
        )


def _check_receipt(receipt: Receipt, precision: Precision) -> None:
    """Refuse files that differ from PyTorch beyond the bounds (VerificationError)."""
    if receipt.failures:
        lines = '\n  '.join(receipt.failures[:10])
        raise VerificationError(
            f'the ONNX files in {precision} are not the networks, so no bundle is written:\n  '
            f'{lines}\ntry another --onnx-precision'
        )


def _known_receipts(folder: Path) -> Mapping[str, Any]:
    """Read the existing verification.json; empty where there is none."""
    path = folder / VERIFICATION_FILE
    return read_json(path).values if path.exists() else {}


def export_bundle(
    source: Bundle,
    target: Path,
    precision: Precision,
    *,
    force: bool = False,
    bars: Bars = no_bars,
    report: Report = no_report,
    observations: Sequence[Observation] = (),
    beside: Precision = 'float32',
    attention: Attention = 'exact',
) -> Bundle:
    """Copy a bundle, without its ONNX files and engines, and write new ONNX files (as `add_onnx`).

    Args:
        target: the source's own folder is allowed with `force`.
        observations: of the policy at its task, for 8 bits.

    Raises BundleError: the target exists; ExportError: as `add_onnx`; too few observations;
    ValueError: int8 on a CPU that does not multiply it, or an observation that does not fit.
    """
    check_packages()
    check_attention(attention, beside if precision in QUANTISED else precision, source.spec)
    cases = None
    if precision in QUANTISED:
        from vla_convert.export.onnx.calibration import calibration_cases

        if precision == 'int8':
            check_int8()
        cases = calibration_cases(source, observations)
    # Before anything is copied, so that an error names the user's own file.
    _known_receipts(source.folder)
    with new_bundle(target, force=force) as folder:
        for name in source.spec.files:
            if name.split('/')[0] not in (ONNX_FOLDER, ENGINES_FOLDER, SPEC_FILE):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.folder / name, folder / name)
        add_onnx(folder, source.spec, precision, bars, report, cases, beside, attention)
        kept = {
            name: digest
            for name, digest in source.spec.files.items()
            if not name.startswith(f'{ONNX_FOLDER}/') and name != VERIFICATION_FILE
        }
        seal(folder, replace(source.spec, files=kept))
    return read_bundle(target, verify=False)


def bundle_with_onnx(
    bundle: Path,
    folder: Path,
    precision: Precision | None = None,
    tell: Callable[[str], object] = lambda text: None,
    observations: Callable[[], Sequence[Observation]] = tuple,
    attention: Attention = 'exact',
) -> Path:
    """Return the bundle if it has such ONNX files, else a copy in `folder` that has them.

    The copy's name holds a SHA-256 of policy.yaml and of this package's version, so a changed
    policy is exported again. A damaged copy is replaced.

    Args:
        precision: None: any that are there, else float32.
        tell: gets a line before an export, which can take a minute.
        observations: makes the observations, for 8 bits.
        attention: fused files are always a copy's.

    Raises BundleError: no bundle there, or no copy can be made; ExportError: as `add_onnx`;
    OSError: a copy that is not whole cannot be removed.
    """
    if attention == 'exact' and graph_path(bundle, 'vision').is_file():
        found = read_graph_facts(bundle / ONNX_FOLDER, ()).precision
        if precision in (None, found):
            return bundle
    precision = precision or 'float32'
    source = read_bundle(bundle)
    written = (source.folder / SPEC_FILE).read_bytes()
    digest = hashlib.sha256(written + __version__.encode()).hexdigest()[:12]
    form = '' if attention == 'exact' else f'_{attention}'
    copy = folder / f'{bundle.resolve().name}_onnx_{precision}{form}_{digest}'
    if _is_whole(copy):
        return copy
    tell(f'exporting ONNX files to {copy} and comparing them with PyTorch, once (a minute or less)')
    if copy.exists() and not (copy / SPEC_FILE).is_file():
        # `export_bundle` replaces bundles only; but nobody else gives a folder such a name.
        shutil.rmtree(copy)
    try:
        export_bundle(
            source,
            copy,
            precision,
            force=copy.exists(),
            observations=observations(),
            attention=attention,
        )
    except BundleError:
        # Another process may have written the same copy first.
        if not _is_whole(copy):
            raise
    return copy


def _is_whole(bundle: Path) -> bool:
    try:
        read_bundle(bundle)
    except BundleError:
        return False
    return True
