"""`vla_runtime status` on a real graph, as a person at the robot types it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from executor_bench import PATIENT_ROBOT, Bench, start
from graph import graph
from paths import ROOT

from vla_runtime.cli.main import main

pytestmark = pytest.mark.graph


def status(*arguments: str) -> tuple[int, str]:
    """Exit code and output."""
    done = subprocess.run(
        [sys.executable, '-m', 'vla_runtime', 'status', *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def robot(namespace: str) -> dict[str, Any]:
    """The robot in a namespace, as JSON has it."""
    code, text = status('--json', '--namespace', namespace)
    document = json.loads(text)
    assert document['exit_code'] == code
    (found,) = document['robots']
    return found


@pytest.fixture(scope='module')
def bench(bundle: Path) -> Iterator[Bench]:
    with graph() as made:
        bench = Bench(made, bundle, '/arm')
        bench.begin()
        yield bench
        bench.arm.close()


def test_an_empty_graph_gives_2_and_says_what_was_looked_at() -> None:
    code, text = status('--namespace', '/nobody')
    assert code == 2
    for word in ('ROS_DOMAIN_ID', 'ROS_AUTOMATIC_DISCOVERY_RANGE', 'docs/'):
        assert word in text


@pytest.mark.parametrize('name', ['left arm', '/1st'])
def test_a_namespace_that_is_none_is_refused_by_name(name: str, capsys) -> None:
    assert main(['status', '--namespace', name]) == 2
    said = capsys.readouterr()
    assert repr(name) in said.err and not said.out


@pytest.mark.parametrize('domain', ['abc', '233', '-1'])
def test_a_domain_that_is_none_is_named(
    domain: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv('ROS_DOMAIN_ID', domain)
    assert main(['status']) == 2
    assert f"ROS_DOMAIN_ID is '{domain}'" in capsys.readouterr().err


def test_a_robot_that_is_ready_gives_0(bench: Bench) -> None:
    bench.wait_for_status('that it is ready', lambda s: s['level'] == 0)
    code, text = status('--namespace', 'arm')
    assert (code, 'call ~/start' in text) == (0, True)
    code, text = status('--namespace', '/amr')
    assert (code, '/arm' in text.split()) == (2, True)


def test_a_node_that_could_not_be_configured_says_why(bench: Bench, bundle: Path) -> None:
    other = bundle.parent / 'other.yaml'
    other.write_text(PATIENT_ROBOT.replace('shoulder_pan', 'waist'), encoding='utf-8')
    start(bench.graph, bundle, '-r', '__ns:=/misfit', '-p', f'robot:={other}', name='misfit')
    assert not bench.graph.transition('/misfit/vla_executor', 'configure')
    found = robot('/misfit')
    (node,) = found['nodes']
    assert node['lifecycle'] == 'unconfigured' and found['mode'] == 'inactive'
    assert 'shoulder_pan' in found['why'] and str(other) in found['why']
    assert status('--namespace', '/misfit')[0] == 1


def test_without_a_driver_it_asks_for_domain_and_range(bench: Bench, bundle: Path) -> None:
    start(bench.graph, bundle, '-r', '__ns:=/off', '-p', 'autostart:=true', name='executor alone')
    bench.graph.wait_for(
        lambda: any(
            item.name == '/off/vla_executor: control' and 'not started' in item.message
            for message in list(bench.diagnostics)
            for item in message.status
        ),
        'its status',
    )
    found = robot('/off')
    assert 'ROS_DOMAIN_ID' in found['start_refused'] and 'driver' in found['start_refused']
    # Nothing of the 16 joints.
    assert 'shoulder_pan' not in found['start_refused']
    assert 'no policy node' in found['why'] and found['state'] == 'not started'
    assert found['remedy'].endswith('#nothing-in-the-graph')


@pytest.mark.parametrize(
    ('fault', 'words'),
    [
        ('silent', ('/arm/joint_states', '/test')),
        ('clock', ('/arm/joint_states', '/test', 'clock', 'chrony')),
    ],
)
def test_joint_states_that_do_not_come_and_clocks_are_told_apart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str, words: tuple[str, ...]
) -> None:
    bench.arm.silent = fault == 'silent'
    if fault == 'clock':
        now_ns = bench.arm.now_ns
        monkeypatch.setattr(bench.arm, 'state_ns', lambda: now_ns() - 3_000_000_000)
    refused = bench.wait_for_status(
        'that a start would be refused',
        lambda s: all(word in s['start_refused'] for word in words),
    )
    assert ('clock' in refused['start_refused']) == (fault == 'clock')
    assert '[' not in refused['text'] and len(refused['start_refused']) < 300
    answer = bench.call('start')
    assert not answer.success and all(word in answer.message for word in words)
    bench.arm.heal()
