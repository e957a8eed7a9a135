"""What can run the policy bundle on this machine, and whether its engines are of this GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from vla_runtime.bundle.folder import Bundle
from vla_runtime.engines.candidates import Candidate, candidates
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.preflight import AUTO, check_backend
from vla_runtime.engines.tensorrt.adapter import import_tensorrt
from vla_runtime.engines.tensorrt.store import find_engines, rebuild_command, state_of
from vla_runtime.nodes.doctor.findings import Finding, note, ok, problem

AREA = 'policy'


def engine_findings(bundle: Bundle) -> list[Finding]:
    """Say which backend would run the bundle, and which of its built engines are of no use here."""
    folders = sorted(one for one in bundle.engines_folder.glob('*-trt*') if one.is_dir())
    usable, engines = '', []
    if folders:
        try:
            usable = _find(bundle)
            engines.append(ok(AREA, 'engines', f'{usable}: of this GPU and TensorRT'))
        except ValueError as error:
            engines.append(_unusable(bundle, [one.name for one in folders], str(error)))
    engines += [
        note(AREA, 'engines', f'{folder.name}: {state_of(folder, bundle.spec.files)}')
        for folder in folders
        if folder.name != usable
    ]
    return [*_runs(bundle, has_engines=bool(usable)), *engines]


def _find(bundle: Bundle) -> str:
    """Return the folder of the engines for the first GPU (ValueError: none, and what mends it)."""
    adapter = import_tensorrt()
    with closing(CudaRuntime(0)) as runtime:
        folder, _ = find_engines(
            bundle.folder, runtime.info, adapter.version, bundle.spec.files, rtx=adapter.is_rtx
        )
    return folder.name


def _unusable(bundle: Bundle, names: list[str], why: str) -> Finding:
    command = rebuild_command(bundle.folder)
    text, _, _ = why.removeprefix("backend 'tensorrt': ").partition('; ')
    return problem(
        AREA,
        'engines',
        f'{", ".join(names)}: none of them can run here: {text}',
        f'build them on this GPU ({command}), or run the bundle with another backend',
    )


def _runs(bundle: Bundle, *, has_engines: bool) -> Iterator[Finding]:
    reasons = []
    for device in ('cuda', 'cpu'):
        found: list[Candidate] = []
        try:
            found = candidates(bundle, AUTO, device, AUTO)
        except ValueError as error:
            reasons.append(str(error))
        for one in found:
            if one.backend == 'tensorrt' and not has_engines:
                continue
            try:
                check_backend(one.backend, device)
            except ValueError as error:
                reasons.append(str(error))
                continue
            yield ok(AREA, 'runs', f'{one}, on {device}')
            return
    yield problem(
        AREA,
        'runs',
        f'nothing here can: {reasons[-1] if reasons else "no backend is installed"}',
        './run setup installs PyTorch and ONNX Runtime; docs/howto/backend.md',
    )
