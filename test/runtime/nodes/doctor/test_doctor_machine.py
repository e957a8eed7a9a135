"""The doctor's look at files and devices, without a graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pages import text_of
from paths import ROOT
from tensorrt_machine import Machine, linked_copy, write_exported_policy
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.nodes.doctor import jetpack, machine
from vla_runtime.nodes.doctor.findings import Finding
from vla_runtime.nodes.doctor.policies import engine_findings
from vla_runtime.nodes.doctor.subject import bring_together
from vla_runtime.robot.file import load_robot

TABLETOP = ROOT / 'config' / 'robots' / 'tabletop.yaml'


@pytest.fixture(scope='module')
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exported_policy(tmp_path_factory.mktemp('exported') / 'tiny')


def problems(findings: list[Finding]) -> dict[str, Finding]:
    return {one.what: one for one in findings if one.level == 'problem'}


def engines(bundle: Path) -> list[Finding]:
    return [one for one in engine_findings(read_bundle(bundle)) if one.what == 'engines']


def test_engines_of_this_gpu_are_well_and_those_of_another_are_found(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = linked_copy(exported, tmp_path / 'bundle')
    Machine(monkeypatch, bundle).build()
    (here,) = engines(bundle)
    assert here.level == 'ok' and 'orin' in here.text
    Machine(monkeypatch, bundle, name='Thor')
    found = problems(engines(bundle))
    assert 'Thor' in found['engines'].text and 'orin' in found['engines'].text
    assert f'vla_runtime build {bundle}' in found['engines'].mend


def test_engines_where_no_gpu_answers_are_found(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = linked_copy(exported, tmp_path / 'bundle')
    with monkeypatch.context() as patch:
        Machine(patch, bundle).build()
    for module in ('tensorrt', 'cuda.bindings.driver'):
        monkeypatch.setitem(sys.modules, module, None)
    assert problems(engines(bundle)).keys() == {'engines'}


def test_a_bundle_for_another_robot_is_told_and_the_robot_looked_at(tmp_path: Path) -> None:
    bundle = read_bundle(write_tiny_policy(tmp_path / 'tiny', tiny_spec()))
    robot = load_robot(TABLETOP)
    findings, subject = bring_together(robot, bundle, str(bundle.folder))
    found = [one for one in findings if one.level == 'problem']
    assert len(found) > 1 and {one.what for one in found} == {'fit'}
    assert all(str(TABLETOP) in one.text for one in found)
    assert subject is not None and subject.cameras == robot.cameras


def test_a_pytorch_without_cuda_beside_a_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, 'driver_devices', lambda: (1, ''))
    monkeypatch.setattr(machine, 'driver_cuda_version', lambda: (12, 6))
    monkeypatch.setattr(machine, 'installed_torch', lambda: ('2.13.0', ''))
    assert 'PyTorch' in problems(machine.machine_findings({}))
    monkeypatch.setattr(machine, 'installed_torch', lambda: ('2.13.0', '13.0'))
    assert 'CUDA 12' in problems(machine.machine_findings({}))['PyTorch'].mend
    monkeypatch.setattr(machine, 'installed_torch', lambda: ('2.13.0', '12.8'))
    assert 'PyTorch' not in problems(machine.machine_findings({}))


def test_the_installed_pytorch_is_read_without_importing_it() -> None:
    torch = pytest.importorskip('torch')
    assert machine.installed_torch() == (torch.__version__, torch.version.cuda or '')


@pytest.mark.parametrize(
    ('release', 'name'),
    [
        ('# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic', '6.1, 6.2'),
        ('# R38 (release), REVISION: 2.0, GCID: 1', '7.0, 7.1'),
        ('# R39 (release), REVISION: 2.0, GCID: 1', '7.2'),
        ('# R35 (release), REVISION: 5.0, GCID: 1', None),
    ],
)
def test_a_jetson_is_known_by_its_release(release: str, name: str | None, tmp_path: Path) -> None:
    file = tmp_path / 'nv_tegra_release'
    file.write_text(release)
    l4t = jetpack.read_l4t(file)
    assert l4t is not None
    found = jetpack.jetpack_of(l4t)
    assert (found and found.name) == name
    assert jetpack.read_l4t(tmp_path / 'none') is None


def test_versions_of_a_jetpack_are_those_of_the_page() -> None:
    rows = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in text_of('docs/howto/jetson.md').splitlines()
        if line.startswith('| [')
    ]
    written = {
        row[0].split(']')[0].removeprefix('['): (row[2], row[3], row[4], row[5].strip('`'))
        for row in rows
    }
    assert written == {
        one.name: (
            '{}.{}'.format(*one.cuda),
            one.tensorrt,
            '{}.{}, '.format(*one.python) + one.ros.capitalize(),
            one.bindings,
        )
        for one in jetpack.JETPACKS
    }


def test_a_jetson_with_another_python_or_tensorrt_is_found(
    monkeypatch: pytest.MonkeyPatch, exported: Path
) -> None:
    Machine(monkeypatch, exported, '10.3.0')
    monkeypatch.setattr(machine, 'read_l4t', lambda: (38, 2))
    monkeypatch.setattr(machine, 'driver_devices', lambda: (1, ''))
    monkeypatch.setattr(machine.sys, 'version_info', (3, 10, 0))
    found = problems(machine.machine_findings({}))
    assert '3.12' in found['Jetson'].text and '10.13' in found['TensorRT'].text


def test_a_sourced_ros_of_another_python_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, 'path', ['/opt/ros/humble/lib/python3.10/site-packages'])
    monkeypatch.setattr(machine.sys, 'version_info', (3, 12, 0))
    found = problems(machine.machine_findings({'ROS_DISTRO': 'humble'}))
    assert '3.10' in found['Python'].mend


def test_without_ros_the_machine_is_looked_at_all_the_same(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, 'rclpy', None)
    found = problems(machine.machine_findings({}))
    assert 'setup.bash' in found['ROS 2'].mend
