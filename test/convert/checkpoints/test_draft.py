"""A draft of policy.yaml: what the folder states, what is usual, and what the user says."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_convert.checkpoints.draft import KEYS, USUAL, Draft
from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import ExportOptions

PLACE = 'config.json, chunk_size'


def draft(**options: object) -> Draft:
    made = Draft(Path('folder'), ExportOptions(**options), MissingFacts(Path('folder')))
    made.is_of('LeRobot', 'act')
    return made


def settle(made: Draft, usual: int | None = None) -> Draft:
    made.settle('horizon', '--horizon', 'actions of a chunk', usual=usual)
    return made


def test_what_the_folder_states_keeps_its_place():
    made = draft()
    made.write(PLACE, horizon=8)
    settle(made).missing.raise_if_any()
    assert (made.horizon, made.origins()) == (8, [('dimensions.horizon', PLACE)])


def test_an_option_that_agrees_changes_nothing_and_one_that_does_not_is_a_conflict():
    for given, is_refused in ((8, False), (9, True)):
        made = draft(horizon=given)
        made.write(PLACE, horizon=8)
        settle(made)
        assert made.origins() == [('dimensions.horizon', PLACE)]
        if is_refused:
            with pytest.raises(ExportError, match='--horizon says 9 but the LeRobot act folder'):
                made.missing.raise_if_any()


def test_an_option_overwrites_what_is_only_assumed():
    for options, expected in (({}, (8, 'the project')), ({'horizon': 9}, (9, '--horizon'))):
        made = draft(**options)
        made.assume('the project', horizon=8)
        settle(made).missing.raise_if_any()
        assert (made.horizon, made.places['horizon']) == expected


def test_what_is_usual_is_taken_last_and_what_nobody_says_is_asked_for():
    assert settle(draft(), usual=50).horizon == 50
    assert settle(draft(), usual=50).places['horizon'] == USUAL
    assert [one.option for one in settle(draft()).missing.questions] == ['--horizon']


def test_the_familys_own_words_ask():
    made = Draft(
        Path('folder'),
        ExportOptions(),
        MissingFacts(Path('folder')),
        wanted={'--horizon': 'CHUNK of the training'},
    )
    (question,) = settle(made).missing.questions
    assert question.wanted == 'CHUNK of the training'


def test_nothing_leaves_a_field_without_a_place():
    made = draft()
    made.write(PLACE, horizon=None, trained_delay_steps=0)
    assert made.origins() == []


def test_a_field_that_no_draft_has_is_refused():
    with pytest.raises(TypeError, match='horizont'):
        draft().write(PLACE, horizont=8)


def test_every_key_is_a_field():
    assert set(KEYS) <= set(Draft.__dataclass_fields__)
