"""`vla_runtime demo` as a person runs it: to its end, interrupted, and with a crash in it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from demo_process import NODES, TIMEOUT_S, Demo, require_report
from full_disk import fill, small_disk
from paths import ROOT
from rosbags.interfaces import QosDurability, QosReliability
from rosbags.rosbag2 import Reader
from tabletop_policy import write_tabletop_policy

from vla_convert.export.onnx.bundle import bundle_with_onnx

pytestmark = pytest.mark.graph


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    return write_tabletop_policy(tmp_path_factory.mktemp('bundle') / 'tabletop')


def nothing_is_left(pids) -> bool:
    return not any(map(lives, pids))


def lives(pid: int) -> bool:
    """Return True if a process runs; one that ended but was not waited for does not."""
    try:
        with open(f'/proc/{pid}/stat') as stat:
            return stat.read().rsplit(')', 1)[1].split()[0] != 'Z'
    except OSError:
        return False


def wait_until_nothing_is_left(pids) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not nothing_is_left(pids):
        assert time.monotonic() < end_s, 'a child outlived the demo'
        time.sleep(0.02)


def profiles(bag) -> dict:
    """The QoS of each topic of a bag."""
    with Reader(bag) as reader:
        return {
            connection.topic: connection.ext.offered_qos_profiles[0]
            for connection in reader.connections
        }


@pytest.fixture(scope='module')
def finished(bundle, tmp_path_factory) -> tuple[Demo, str]:
    """Return a demo that ran to its end, and its output."""
    demo = Demo(bundle, tmp_path_factory.mktemp('finished') / 'out', seconds=8.0)
    code, text = demo.end()
    assert code == 0, text
    return demo, text


def test_it_runs_to_its_end_and_leaves_bag_parameters_and_report(bundle, finished):
    demo, text = finished
    assert 'replan 8' in text
    page = require_report(demo.out)
    assert 'instructions completed' in page
    # Five plots, each drawn wide and narrow.
    assert page.count('<svg') == 10
    assert 'data:image/jpeg;base64,' in page
    parameters = yaml.safe_load((demo.out / 'parameters.yaml').read_text())
    assert parameters['/demo/vla_executor']['ros__parameters']['replan_interval'] == 8
    assert parameters['/demo/vla_policy']['ros__parameters']['bundle'] == str(bundle)
    with Reader(demo.out / 'bag') as reader:
        counts = {connection.topic: connection.msgcount for connection in reader.connections}
    for topic in ('joint_states', 'action_chunk', 'committed_plan', 'vla_policy/report'):
        assert counts[f'/demo/{topic}'] > 0
    assert counts['/demo/front/image_raw/compressed'] > 0
    assert counts['/demo/arm_controller/joint_trajectory'] > 100
    # The same source for both.
    said = re.search('chunks: (.*)', text).group(1)
    assert f'<td>{said}</td>' in page
    sent, received = map(int, re.match(r'(\d+) sent by the policy, (\d+) received', said).groups())
    assert 0 < received <= sent == counts['/demo/action_chunk']
    assert 'at most 4 a second' in page


def test_the_bag_has_the_quality_of_service_of_the_publishers(finished):
    demo, _ = finished
    offered = profiles(demo.out / 'bag')
    instruction = offered['/demo/vla_policy/instruction']
    assert instruction.durability is QosDurability.TRANSIENT_LOCAL
    assert offered['/demo/action_chunk'].durability is QosDurability.VOLATILE
    assert offered['/demo/action_chunk'].reliability is QosReliability.RELIABLE
    assert offered['/demo/joint_states'].reliability is QosReliability.BEST_EFFORT


def test_ctrl_c_again_and_again_ends_it_cleanly_with_the_report_written(bundle, tmp_path):
    demo = Demo(bundle, tmp_path / 'out', seconds=60.0)
    demo.wait_for_line(r'chunk [1-9]')
    pids = demo.children()
    end_s = time.monotonic() + TIMEOUT_S
    while demo.process.poll() is None and time.monotonic() < end_s:
        demo.process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    code, text = demo.end()
    assert code == 0, text
    assert 'Traceback' not in text
    assert 'ended with Ctrl-C' in require_report(demo.out)
    executor = demo.log('executor')
    assert executor.count(']: started') == executor.count('stopped: holding') > 0
    assert all('Traceback' not in demo.log(name) for name in NODES)
    assert nothing_is_left(pids)


@dataclass
class Closed:
    """A demo on ONNX Runtime whose terminal was closed.

    Attributes:
        out: its folder.
        bundle: bundle with the files of ONNX Runtime.
        said: output up to the first chunk.
        code: exit code.
    """

    out: Path
    bundle: Path
    said: str
    code: int


@pytest.fixture(scope='module')
def closed(bundle, tmp_path_factory) -> Closed:
    folder = tmp_path_factory.mktemp('closed')
    out, cache = folder / 'out', folder / 'cache'
    # What the demo would do itself at its first run, without its time limit.
    made = bundle_with_onnx(bundle, cache / 'vla_runtime')
    terminal, its_side = pty.openpty()
    arguments = ['--seconds', '60', '--out', out, '--bundle', bundle, '--backend', 'onnxruntime']
    process = subprocess.Popen(
        ['setsid', '--ctty', sys.executable, '-m', 'vla_runtime', 'demo', *arguments],
        cwd=ROOT,
        stdin=its_side,
        stdout=its_side,
        stderr=its_side,
        env={**os.environ, 'XDG_CACHE_HOME': str(cache)},
    )
    os.close(its_side)
    seen = b''
    while not re.search(rb'chunk [1-9]', seen):
        seen += os.read(terminal, 4096)
    os.close(terminal)
    return Closed(out, made, seen.decode(), process.wait(TIMEOUT_S))


@pytest.mark.thorough
def test_a_closed_terminal_ends_it_like_ctrl_c(closed):
    assert closed.code == 0
    assert 'its terminal was closed' in require_report(closed.out)


@pytest.mark.thorough
def test_it_drives_with_onnx_runtime(closed):
    assert 'exporting' not in closed.said
    parameters = yaml.safe_load((closed.out / 'parameters.yaml').read_text())
    policy = parameters['/vla_policy']['ros__parameters']
    assert (policy['backend'], policy['bundle']) == ('onnxruntime', str(closed.bundle))
    with Reader(closed.out / 'bag') as reader:
        counts = {connection.topic: connection.msgcount for connection in reader.connections}
    assert counts['/action_chunk'] > 0


@pytest.mark.thorough
def test_its_nodes_die_with_it_even_when_it_is_killed(bundle, tmp_path):
    demo = Demo(bundle, tmp_path / 'out', seconds=60.0)
    demo.wait_for_line(r'chunk [1-9]')
    pids = demo.children()
    demo.process.kill()
    demo.end()
    wait_until_nothing_is_left(pids)


@pytest.mark.thorough
def test_ctrl_c_while_it_starts_leaves_a_report_too(bundle, tmp_path):
    demo = Demo(bundle, tmp_path / 'out', seconds=60.0)
    demo.wait_for_line('starting')
    demo.process.send_signal(signal.SIGINT)
    code, text = demo.end()
    assert code == 0, text
    assert '0 of 0 instructions completed' in require_report(demo.out)


@pytest.mark.thorough
def test_a_crashed_process_is_named_with_its_end(bundle, tmp_path):
    demo = Demo(bundle, tmp_path / 'out', seconds=60.0)
    demo.wait_for_line(r'chunk [1-9]')
    os.kill(demo.child('vla_runtime.nodes.policy.node'), signal.SIGKILL)
    code, text = demo.end()
    assert code == 1, text
    assert 'policy was ended by signal 9' in text
    assert 'policy was ended by signal 9' in require_report(demo.out)
    # The robot was stopped by the one who lived on.
    executor = demo.log('executor')
    assert executor.count(']: started') == executor.count('stopped: holding') > 0


@pytest.mark.thorough
def test_a_node_that_cannot_be_configured_is_named_with_its_own_words(tmp_path):
    bundle = write_tabletop_policy(tmp_path / 'damaged')
    weights = bundle / 'weights.safetensors'
    weights.write_bytes(weights.read_bytes()[:-4] + b'\0\1\2\3')
    demo = Demo(bundle, tmp_path / 'out', seconds=60.0)
    code, text = demo.end()
    assert code == 1, text
    assert 'vla_policy could not configure; its last output' in text
    assert 'configure failed' in text.split('its last output')[1]
    assert str(demo.out / 'log' / 'policy.log') in text
    assert 'configure failed' in require_report(demo.out)


@pytest.mark.thorough
def test_it_drives_on_to_its_end_and_leaves_a_report_and_a_closed_bag(tmp_path):
    bundle = write_tabletop_policy(tmp_path / 'tabletop')
    with small_disk(tmp_path / 'disk', 64 * 1024) as disk:
        demo = Demo(bundle, disk / 'out', seconds=120.0)
        demo.wait_for_line(r'chunk [1-9]')
        fill(disk)
        demo.wait_for_line('recording has ended: No space left on device')
        before = demo.chunks()
        while demo.chunks() < before + 5:
            demo.wait_for_line('chunk ')
        demo.process.send_signal(signal.SIGINT)
        code, text = demo.end()
        assert code == 1, text
        assert 'Traceback' not in text
        assert f'error: {disk}/out/bag/bag.mcap: recording has ended: No space left' in text
        page = require_report(demo.out)
        assert 'bag.mcap: recording has ended' in page
        assert 'Ended early' not in page
        assert yaml.safe_load((demo.out / 'parameters.yaml').read_text())
        with Reader(demo.out / 'bag') as reader:
            kept = sum(1 for _ in reader.messages())
            assert kept == reader.message_count > 100


def test_a_disk_without_room_is_said_before_anything_starts(tmp_path):
    bundle = write_tabletop_policy(tmp_path / 'tabletop')
    with small_disk(tmp_path / 'disk', 4096) as disk:
        demo = Demo(bundle, disk / 'out', seconds=5.0)
        code, text = demo.end()
    assert code == 2
    assert '16 MiB must be free for the report' in text
    assert f'{disk}/out' in text
    assert 'starting policy' not in text
