"""A joint space converts certain joints: others under its name are refused by their field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_policy import aloha_spec, tiny_spec

from vla_runtime.bundle.rules import check_spec, dump_spec, parse_spec
from vla_runtime.bundle.summary import describe
from vla_runtime.files.field_error import FieldError


def changed(group: str, index: int, **changes):
    spec = aloha_spec()
    items = list(getattr(spec, group))
    items[index] = replace(items[index], **changes)
    return replace(spec, **{group: tuple(items)})


def test_alohas_joints_are_accepted_written_and_shown():
    spec = aloha_spec()
    text = dump_spec(spec)
    assert 'joint_space: openpi_aloha' in text
    assert parse_spec(text) == spec
    assert 'openpi_aloha' in describe(spec)
    assert 'joint_space' not in dump_spec(tiny_spec())


@pytest.mark.parametrize(
    ('spec', 'words'),
    [
        (replace(tiny_spec(), joint_space='openpi_aloha'), 'field state'),
        (
            replace(aloha_spec(), actions=aloha_spec().actions[:13]),
            'field actions',
        ),
        (changed('state', 6, unit='m'), r'field state\[6\]\.unit'),
        (
            replace(
                changed('state', 3, unit='deg'), actions=changed('actions', 3, unit='deg').actions
            ),
            r'field state\[3\]\.unit',
        ),
        (changed('actions', 13, unit='percent'), r'field actions\[13\]\.unit'),
        (
            changed('actions', 6, kind='delta', relative_to='lg'),
            r'field actions\[6\]\.kind',
        ),
        (
            changed('actions', 6, kind='velocity'),
            r'field actions\[6\]\.kind',
        ),
        (
            changed('actions', 1, relative_to='r2'),
            r'field actions\[1\]\.relative_to',
        ),
    ],
)
def test_other_joints_are_refused_by_field(spec, words):
    with pytest.raises(FieldError, match=words):
        check_spec(spec)
