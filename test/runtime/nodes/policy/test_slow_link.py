"""An arm whose policy is behind a slow, lossy link, in a network namespace of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from graph import graph
from remote_robot import POLICY, Running, remote_files
from served_process import ServedProcess
from slow_link import Quality, SlowLink

pytestmark = pytest.mark.graph
SLOW = Quality(delay_s=0.05, loss=0.02)


@pytest.fixture(scope='module')
def link() -> Iterator[SlowLink]:
    try:
        with SlowLink(SLOW) as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f'no network namespace with a TUN device can be made here: {error}')


@pytest.fixture(scope='module')
def running(link: SlowLink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp('slow')
    bundle, robot = remote_files(folder)
    keys = folder / 'keys'
    keys.write_text(f'{"k" * 32}\n')
    options = ('--host', '0.0.0.0', '--key-file', str(keys))
    server = ServedProcess(bundle, *options, before=link.there, host=link.address)
    with graph() as made:
        running = Running(
            made,
            robot,
            server.url,
            server_key_file=keys,
            server_timeout_s=3.0,
        )
        running.start()
        yield running
    server.kill()


def test_an_arm_moves_behind_a_slow_link(running: Running, link: SlowLink) -> None:
    dropped = link.dropped
    running.move()
    running.graph.wait_for(lambda: link.dropped > dropped, 'a packet that gets lost')
    running.move()
    said = running.say(POLICY, 'server', 'connected')
    # There and back.
    assert float(said['network_ms']) >= 100.0


def test_an_arm_holds_at_a_cut_link_and_goes_on_without_a_jump(
    running: Running, link: SlowLink
) -> None:
    running.move()
    link.quality = replace(SLOW, is_cut=True)
    running.hold()
    held = running.arm.arm[-1]
    running.say(POLICY, 'observation', link.address)
    running.hold()
    assert running.arm.arm[-1] == held
    link.quality = SLOW
    running.graph.wait_for(lambda: running.arm.arm[-1] != held, 'motion')
    on = next(command for command in running.arm.arm if command != held)
    # 10 rad/s, and ticks of a busy machine.
    assert np.abs(np.subtract(on, held)).max() <= 0.5
    running.move()
