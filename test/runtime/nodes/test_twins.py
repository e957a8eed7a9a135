"""Which of two nodes came first, by what they say of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vla_runtime.nodes.polled_topics import HeardItem
from vla_runtime.nodes.twins import Claim, find_first, node_item, read_claim, why_second

ARM = '/arm_controller/joint_trajectory'
MINE = Claim('/vla_executor', 'process 2 on robot', 200, 'configuring', topics=frozenset({ARM}))
MOVING = Claim('/vla_executor', 'process 1 on robot', 100, 'active', True, frozenset({ARM}))


@pytest.mark.parametrize(
    ('other', 'is_first'),
    [
        (MOVING, True),
        # Another name on one output.
        (replace(MOVING, node='/teleop/vla_executor'), True),
        # The clocks of two computers differ.
        (replace(MOVING, since_ns=900), True),
        (
            replace(MOVING, lifecycle='inactive', moves=False, topics=frozenset(), since_ns=900),
            True,
        ),
        (replace(MOVING, lifecycle='unconfigured', moves=False, topics=frozenset()), True),
        (
            replace(
                MOVING, lifecycle='unconfigured', moves=False, topics=frozenset(), since_ns=900
            ),
            False,
        ),
        # A second arm in its namespace.
        (replace(MOVING, node='/left/vla_executor', topics=frozenset({f'/left{ARM}'})), False),
        # Configured for the same outputs, and not active: it may take turns with this one.
        (
            replace(MOVING, node='/other', lifecycle='inactive', moves=False, topics=frozenset()),
            False,
        ),
    ],
)
def test_the_one_that_came_first_is_found(other: Claim, is_first: bool) -> None:
    assert find_first(MINE, [other]) == (other if is_first else None)


@pytest.mark.parametrize('started', [0, 1, 2])
def test_two_that_meet_agree_on_the_first(started: int) -> None:
    one = replace(MINE, lifecycle='active', moves=started == 1)
    other = replace(MOVING, moves=started == 2)
    found = [find_first(one, [other]), find_first(other, [one])]
    assert sorted(bool(first) for first in found) == [False, True]
    assert found[0 if started != 1 else 1] is (other if started != 1 else one)


def test_a_claim_is_read_as_it_was_said() -> None:
    for claim in (MINE, MOVING, replace(MINE, topics=frozenset())):
        item = node_item(claim)
        values = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in item.values.items()
        }
        heard = HeardItem(claim.node, item.name, int(item.level), item.text, values, 0.0)
        assert read_claim(heard) == claim
        del values['process']
        assert read_claim(heard) is None


def test_the_refusal_names_the_first_and_what_mends_it() -> None:
    said = why_second(MINE, MOVING, 'give this one a namespace of its own')
    for word in (MOVING.node, MOVING.process, ARM, 'namespace', 'ROS_DOMAIN_ID'):
        assert word in said
