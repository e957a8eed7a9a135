"""Many recordings in several processes: resumable, and the same results as one after the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import psutil
import pytest
from local_ray import local_cluster, needs_ray
from paths import ROOT
from recorded_bag import Turn, record
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.cli import main as program
from vla_runtime.files.json_file import LARGEST_JSON
from vla_runtime.processes.workers import Submit, workers
from vla_runtime.recording.bag_reader import BagReadError, find_recordings
from vla_tools.replay.batch import run_batch, totals
from vla_tools.replay.setup import Changes
from vla_tools.replay.units import Unit, run_unit

_TIMES = {'replay_s', 'median_ms'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory, bundle, robot_file):
    """Four recordings at different depths, and one that nothing can be read of."""
    folder = tmp_path_factory.mktemp('many')
    for number, place in enumerate(('a', 'b', 'deep/c', 'deep/er/d')):
        record(folder / place, bundle, robot_file, [Turn()] * (number + 1), seed=number)
    (folder / 'e').mkdir()
    (folder / 'e' / 'e.mcap').write_bytes(b'nothing')
    return folder


def units(folder, **changes) -> list[Unit]:
    return [Unit(path, Changes(**changes)) for path in find_recordings([folder])]


def without_times(results) -> list[dict]:
    plain = [{k: v for k, v in result.items() if k not in _TIMES} for result in results]
    return sorted(plain, key=lambda result: result['recording'])


def test_recordings_are_found_at_any_depth(folder, tmp_path):
    names = [path.name for path in find_recordings([folder])]
    assert names == ['a', 'b', 'c', 'd', 'e']
    assert find_recordings([folder / 'a', folder / 'deep']) == [
        folder / 'a',
        folder / 'deep' / 'c',
        folder / 'deep' / 'er' / 'd',
    ]
    assert find_recordings([folder / 'deep' / 'c', folder / 'deep']) == [
        folder / 'deep' / 'c',
        folder / 'deep' / 'er' / 'd',
    ]
    with pytest.raises(BagReadError):
        find_recordings([tmp_path])


def test_a_file_beside_recordings_is_one_and_links_are_not_followed_for_ever(folder, tmp_path):
    batch = tmp_path / 'batch'
    shutil.copytree(folder / 'a', batch / 'a')
    (batch / 'loose.mcap').write_bytes(b'')
    (batch / 'again').symlink_to(batch)
    assert find_recordings([batch]) == [batch / 'a', batch / 'loose.mcap']


@pytest.mark.thorough
def test_two_processes_give_the_results_of_one(folder, tmp_path):
    made = [result for _, result in run_batch(units(folder), tmp_path, partial(workers, 2))]
    assert without_times(made) == without_times(map(run_unit, units(folder)))
    total = totals(made)
    assert (total['recordings'], total['failed']) == (5, 1)
    assert total['inferences'] == total['identical'] == 10
    (failed,) = (result['error'] for result in made if 'error' in result)
    assert failed.startswith(str(folder / 'e'))


@contextmanager
def here() -> Iterator[Submit]:
    """Run what is submitted in this process, at once."""

    def submit(function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future

    yield submit


def test_what_is_there_is_not_run_again(folder, tmp_path):
    first = list(run_batch(units(folder)[:2], tmp_path, here))
    large = next(tmp_path.iterdir())
    large.write_text(large.read_text() + ' ' * LARGEST_JSON)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 2
    again = list(run_batch(units(folder), tmp_path, here))
    assert sorted(again[:2], key=lambda one: one[0].name) == sorted(
        first, key=lambda one: one[0].name
    )
    assert all(path.stat().st_mtime_ns == at for path, at in files.items())
    # Another question has results of its own.
    names = {unit.name for unit, _ in again}
    assert names.isdisjoint(unit.name for unit in units(folder, threads=2))


def test_a_bundle_that_was_made_anew_is_another_result(folder, tmp_path):
    bundle = write_tiny_policy(tmp_path / 'other', tiny_spec(advantage='task_newline'), seed=1)
    (before, *_) = units(folder, bundle=bundle)
    name = before.name
    assert before.name == name
    shutil.rmtree(bundle)
    write_tiny_policy(tmp_path / 'other', tiny_spec(advantage='task_newline'), seed=2)
    assert before.name != name


def test_a_fault_of_the_networks_costs_one_recording(folder, tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError('not enough memory: you tried to allocate 8 bytes')

    monkeypatch.setattr('vla_tools.replay.units.Replay.inferences', fail)
    result = run_unit(units(folder)[0])
    assert 'not enough memory' in result['error']


def test_what_failed_is_tried_again(folder, tmp_path, bundle):
    # As in no other test, so that the policy is not loaded yet.
    threads = 4
    moved = bundle.rename(bundle.with_name('elsewhere'))
    try:
        ((_, failed),) = run_batch(units(folder, threads=threads)[:1], tmp_path, here)
    finally:
        moved.rename(bundle)
    assert 'error' in failed
    ((_, result),) = run_batch(units(folder, threads=threads)[:1], tmp_path, here)
    assert 'error' not in result and result['replayed'] == 1


@pytest.mark.thorough
def test_a_killed_process_costs_its_own_recording_and_the_same_command_goes_on(
    folder, tmp_path, capsys
):
    words = ['replay', str(folder), '--out', str(tmp_path / 'results'), '--workers', '2']
    process = subprocess.Popen(
        [sys.executable, '-m', 'vla_runtime', *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    child = _first_child(process)
    os.kill(child, signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert 'the same command goes on where it was' in said
    # For the one that is damaged.
    assert program.main(words) == 2
    captured = capsys.readouterr()
    assert '1 of 5 recordings cannot be used' in captured.err
    said = captured.out
    assert 'recordings 5, failed 1, inferences 10, replayed 10, compared 10, identical 10' in said
    summary = json.loads((tmp_path / 'results' / 'summary.json').read_text())
    assert without_times(summary['recordings']) == without_times(map(run_unit, units(folder)))


@needs_ray
def test_a_cluster_of_two_gives_the_summary_of_one_process_with_a_worker_killed_too(
    folder, tmp_path, capsys
):
    with local_cluster(tmp_path, ROOT) as addresses:
        words = ['replay', str(folder), '--ray', addresses.member, '--out']
        assert program.main([*words, str(tmp_path / 'whole')]) == 2
        with ThreadPoolExecutor(1) as beside:
            killed = beside.submit(_kill_a_ray_worker)
            assert program.main([*words, str(tmp_path / 'killed')]) == 2
            assert killed.result(120)
    assert 'recordings 5, failed 1, inferences 10, replayed 10' in capsys.readouterr().out
    expected = without_times(map(run_unit, units(folder)))
    for name in ('whole', 'killed'):
        summary = json.loads((tmp_path / name / 'summary.json').read_text())
        assert without_times(summary['recordings']) == expected


def _kill_a_ray_worker() -> int:
    """Kill the first worker of this process's cluster that has work; return its id."""
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        for one in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if 'ray::_call' in ' '.join(one.cmdline()):
                    one.kill()
                    return one.pid
        time.sleep(0.005)
    raise AssertionError('no worker was seen at work')


def _first_child(process: subprocess.Popen) -> int:
    """A worker of the command, once there is one."""
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        try:
            task = f'/proc/{process.pid}/task/{process.pid}/children'
            with open(task) as file:
                found = [int(word) for word in file.read().split()]
            for pid in found:
                with open(f'/proc/{pid}/cmdline') as file:
                    if 'spawn_main' in file.read():
                        return pid
        except OSError:
            pass
        time.sleep(0.02)
    raise AssertionError('no worker was started')


def test_recordings_of_one_policy_load_it_once(folder, monkeypatch):
    from vla_tools.replay import rerun

    loads = []
    real = rerun.load_policy
    monkeypatch.setattr(rerun, 'load_policy', lambda *words: loads.append(words) or real(*words))
    # Another number of threads than any other test, so that it is not loaded yet.
    for unit in units(folder, threads=3)[:4]:
        assert run_unit(unit)['replayed'] > 0
    assert len(loads) == 1
