"""An inference that fails does not use up its request: the executor's next repeat is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from graph import Graph, Process, graph
from thorough import thorough_but
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import JOINTS, STEP_TIME_S, Drivers, write_robot

from vla_runtime.messages.trajectories import chunk_type, message_to_chunk, plan_to_message
from vla_runtime.types import PlanRequest

pytestmark = pytest.mark.graph


def start_failing(made: Graph, folder: Path, monkeypatch, fails: str) -> Process:
    monkeypatch.setenv('FAILS', fails)
    bundle = write_tiny_policy(folder / 'tiny', tiny_spec())
    robot = write_robot(folder / 'tiny.yaml')
    return made.start(
        'failing_policy_node',
        '--ros-args',
        *('-p', f'bundle:={bundle}', '-p', f'robot:={robot}'),
        *('-p', 'torch_threads:=1', '-p', 'autostart:=true', '-p', 'instruction:=wave'),
    )


@pytest.mark.parametrize('fails', thorough_but(['later'], ['at once', 'later']))
def test_a_request_whose_inference_failed_is_answered_when_it_is_repeated(
    tmp_path, monkeypatch, fails
):
    with graph() as made:
        drivers = Drivers(made)
        chunks = made.collect(chunk_type(), '/action_chunk')
        node = start_failing(made, tmp_path, monkeypatch, fails)

        def repeat() -> None:
            """Send the one request again and again, as the executor does while it is open."""
            drivers()
            drivers._plan.publish(
                plan_to_message(
                    PlanRequest(
                        np.zeros((0, len(JOINTS))),
                        JOINTS,
                        ['position'] * len(JOINTS),
                        STEP_TIME_S,
                        stamp_ns=drivers.clock_ns(),
                        episode=1,
                        certain=0,
                        request=7,
                    )
                )
            )

        made.wait_for(lambda: chunks, 'a chunk after failures', meanwhile=repeat)
        assert message_to_chunk(chunks[0])[1].request == 7
        # What a process says comes by another way than its messages.
        made.wait_for(lambda: 'the GPU fell off the bus' in node.text(), 'the reason')


class Asked(NamedTuple):
    made: Graph
    node: Process
    chunks: list[Any]
    ask: Callable[[], None]


@contextmanager
def asked(folder: Path, monkeypatch, fails: str) -> Iterator[Asked]:
    """A failing node, and what sends it frames and a new request."""
    with graph() as made:
        drivers = Drivers(made)
        chunks = made.collect(chunk_type(), '/action_chunk')
        node = start_failing(made, folder, monkeypatch, fails)

        def ask() -> None:
            drivers()
            drivers.request()

        yield Asked(made, node, chunks, ask)


def test_settings_that_cannot_be_prepared_are_said_once_and_chunks_go_on(tmp_path, monkeypatch):
    with asked(tmp_path, monkeypatch, 'preparing') as (made, node, chunks, ask):
        made.wait_for(lambda: chunks, 'a chunk with the settings at configure', meanwhile=ask)
        assert made.set_parameter('/vla_policy', 'denoise_steps', 7).successful
        text = 'denoise_steps cannot change: the graphs do not fit into memory'
        made.wait_for(lambda: text in node.text(), 'the reason', meanwhile=ask)
        before = len(chunks)
        made.wait_for(lambda: len(chunks) > before + 3, 'more chunks', meanwhile=ask)
        assert node.text().count(text) == 1
        assert '[vla_policy]: inference: ' not in node.text()


def test_settings_are_prepared_while_every_inference_with_those_before_fails(tmp_path, monkeypatch):
    with asked(tmp_path, monkeypatch, 'until prepared') as (made, node, chunks, ask):
        fell = 'the GPU fell off the bus'
        made.wait_for(lambda: fell in node.text(), 'a failed inference', meanwhile=ask)
        assert not chunks
        assert made.set_parameter('/vla_policy', 'denoise_steps', 7).successful
        made.wait_for(lambda: chunks, 'a chunk with the new settings', meanwhile=ask)
