"""Every fault that a family declares is found by the receipt, in the file that it is in.

The receipt compares right files with networks in which one computation is wrong, as it cannot know
which of the two is; the other way round each fault would need an export of its own. Faults of
numbers are planted in the files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from contract_cases import each_family, of_cases
from family_contracts import contract_of, contracts
from family_contracts.declaration import InGraph, OtherDims, Patched
from made_once import made_once
from onnx_bundles import (  # noqa: F401
    copy_bundle,
    load_graph,
    save_graph,
    sessions_opened_once,
    write_onnx_once,
)
from tiny_policy import tiny_spec, write_tiny_policy

from vla_convert.export.onnx.verification import verify_onnx
from vla_convert.export.onnx.weights import BundleWeights
from vla_convert.export.receipt import VerificationError
from vla_runtime.bundle.schema import BundleSpec

# The files are right and stay so; networks are patched.
pytestmark = pytest.mark.usefixtures('sessions_opened_once')


def right_files(family: str) -> tuple[Path, BundleSpec]:
    """A tiny policy with its ONNX files, not to be changed; made before anything is patched."""
    contract = contract_of(family)
    spec = tiny_spec(family)
    spec = contract.fault_spec(spec) if contract.fault_spec else spec

    def make(target: Path) -> None:
        write_tiny_policy(target, spec)
        write_onnx_once(target, spec, 'float32')

    return made_once(f'faults_{family}', make), spec


def cases() -> list[object]:
    """`(family, name)` of all faults; those that are not quick are thorough."""
    found = []
    for parameter in of_cases(lambda contract: contract.faults and contract.faults()):
        family, name = parameter.values
        quick = contracts()[family].faults()[name].quick
        marks = () if quick else pytest.mark.thorough
        found.append(pytest.param(family, name, id=parameter.id, marks=marks))
    return found


@each_family()
def test_right_files_pass(family: str):
    assert verify_onnx(*right_files(family)).failures == []


@pytest.mark.parametrize(('family', 'name'), cases())
def test_a_fault_is_found_in_its_file(family: str, name: str, monkeypatch, tmp_path: Path):
    fault = contract_of(family).faults()[name]
    folder, spec = right_files(family)
    if isinstance(fault, Patched):
        monkeypatch.setattr(fault.owner, fault.name, fault.wrong)
    elif isinstance(fault, OtherDims):
        spec = BundleSpec(**{**vars(spec), 'dims': fault.change(spec.dims)})
    elif isinstance(fault, InGraph):
        import onnx_faults

        folder = copy_bundle(folder, tmp_path / 'changed')
        model = load_graph(folder, fault.file)
        plant = getattr(onnx_faults, fault.plant) if isinstance(fault.plant, str) else fault.plant
        plant(model)
        save_graph(model, folder, fault.file)
    else:
        read = BundleWeights.read

        def wrong(self: BundleWeights, table: str) -> object:
            found = read(self, table)
            return fault.change(found) if table == fault.table else found

        monkeypatch.setattr(BundleWeights, 'read', wrong)
    try:
        found = verify_onnx(folder, spec).failures
    except VerificationError as error:
        found = [str(error)]
    # Of one prompt row, or of the two of guidance.
    files = fault.file, fault.file.replace('.onnx', '_r2.onnx')
    assert any(file in line for file in files for line in found), found
