"""A disk that fills up as the robot moves costs recordings, not the motion and not the report."""

from __future__ import annotations

import signal

import pytest
import yaml
from demo_process import Demo, require_report
from full_disk import fill, small_disk
from rosbags.rosbag2 import Reader
from tabletop_policy import write_tabletop_policy

pytestmark = pytest.mark.graph


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
