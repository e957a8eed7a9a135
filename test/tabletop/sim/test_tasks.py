"""Tasks: words that mean one thing, and a verdict from the simulator's state alone."""

from __future__ import annotations

import numpy as np
import pytest

from vla_tabletop.sim.episode import Episode, find_task
from vla_tabletop.sim.scene import COLOURS, EDGE_M
from vla_tabletop.sim.success_rate import SuccessRate
from vla_tabletop.sim.tasks import (
    FAMILIES,
    Goal,
    Judge,
    Task,
    all_instructions,
    make_task,
    push_path_is_clear,
    sample_task,
    wordings,
)
from vla_tabletop.sim.world import TabletopState

BLOCKS = np.array([[0.25, 0.10, 0.0175], [0.30, 0.0, 0.0175], [0.22, -0.12, 0.0175]])


def _state(time_s: float = 1.0, tip: tuple = (0.2, 0.0, 0.2), blocks: np.ndarray = BLOCKS):
    return TabletopState(time_s, np.zeros(6), np.zeros(6), np.array(tip), blocks)


def _touch(block: int) -> Task:
    task = make_task('colour', Goal(block), BLOCKS)
    assert task is not None
    return task


def _push(block: int, side: str) -> Task:
    task = make_task('push', Goal(block, side), BLOCKS)  # type: ignore[arg-type]
    assert task is not None
    return task


def test_colour_and_place_name_the_block_as_the_front_camera_sees_it() -> None:
    assert make_task('colour', Goal(1), BLOCKS).instruction == 'touch the green block'
    assert make_task('position', Goal(2), BLOCKS).instruction == 'touch the left-most block'
    assert make_task('position', Goal(0), BLOCKS).instruction == 'touch the right-most block'
    assert make_task('position', Goal(1), BLOCKS) is None, 'the middle block has no such name'
    assert _push(1, 'right').instruction == 'push the green block to the right edge'


def test_the_tip_near_the_named_block_is_a_success() -> None:
    outcome = Judge(_touch(0)).judge(_state(tip=(0.25, 0.10, 0.042)))
    assert outcome is not None and outcome.success and outcome.block == 0
    assert outcome.time_s == 1.0


def test_the_tip_just_out_of_reach_is_no_outcome_yet() -> None:
    assert Judge(_touch(0)).judge(_state(tip=(0.25, 0.10, 0.0175 + 0.0251))) is None


def test_another_block_first_is_a_failure() -> None:
    outcome = Judge(_touch(0)).judge(_state(tip=(0.30, 0.0, 0.03)))
    assert outcome is not None and outcome.name == 'wrong_block' and outcome.block == 1


def test_the_time_limit_counts_from_when_the_task_was_given() -> None:
    judge = Judge(_touch(0), start_s=10.0)
    assert judge.judge(_state(time_s=15.9)) is None
    outcome = judge.judge(_state(time_s=16.0))
    assert outcome is not None and outcome.name == 'timeout'
    assert Judge(_push(0, 'right')).judge(_state(time_s=11.9)) is None


def test_a_push_succeeds_beyond_the_stripe_of_the_named_side() -> None:
    there = BLOCKS.copy()
    there[0, 1] = EDGE_M + 1e-3
    outcome = Judge(_push(0, 'right')).judge(_state(blocks=there))
    assert outcome is not None and outcome.success
    assert Judge(_push(0, 'left')).judge(_state(blocks=there)) is None


def test_pushing_another_block_off_is_a_failure_and_touching_it_is_not() -> None:
    there = BLOCKS.copy()
    there[2, 1] = -EDGE_M - 1e-3
    outcome = Judge(_push(0, 'right')).judge(_state(blocks=there))
    assert outcome is not None and outcome.name == 'wrong_block' and outcome.block == 2
    assert Judge(_push(0, 'right')).judge(_state(tip=(0.30, 0.0, 0.03))) is None


def test_a_block_in_the_way_makes_a_push_path_unclear() -> None:
    blocks = BLOCKS.copy()
    blocks[1, 0] = blocks[2, 0]
    assert not push_path_is_clear(Goal(2, 'right'), blocks)
    assert push_path_is_clear(Goal(2, 'left'), blocks)
    assert push_path_is_clear(Goal(2), blocks)


@pytest.mark.parametrize('family', FAMILIES)
def test_sampled_tasks_are_reproducible_and_cover_what_the_family_can_name(family) -> None:
    drawn = [sample_task(np.random.default_rng(seed), BLOCKS, family) for seed in range(60)]
    again = [sample_task(np.random.default_rng(seed), BLOCKS, family) for seed in range(60)]
    assert drawn == again
    expected = {0, 2} if family == 'position' else set(range(len(COLOURS)))
    assert {task.goal.block for task in drawn} == expected
    assert {task.goal.side for task in drawn} == ({'left', 'right'} if family == 'push' else {None})


def test_held_out_wordings_are_new_sentences_of_known_words() -> None:
    known, held_out = set(all_instructions()), set(all_instructions(held_out=True))
    assert held_out and not known & held_out
    words = {word for sentence in known for word in sentence.split()}
    assert {word for sentence in held_out for word in sentence.split()} <= words


def test_a_wording_is_unambiguous() -> None:
    meanings: dict[str, set] = {}
    for held_out in (False, True):
        for word in (*COLOURS, 'left', 'right'):
            family = 'position' if word in ('left', 'right') else 'colour'
            for sentence in wordings(family, word, held_out=held_out):
                meanings.setdefault(sentence, set()).add(word)
    assert all(len(words) == 1 for words in meanings.values())


def test_tasks_of_some_colours_name_no_others() -> None:
    rng = np.random.default_rng(0)
    block_m = np.array([[0.2, -0.1, 0.0], [0.25, 0.0, 0.0], [0.3, 0.1, 0.0]])
    tasks = [sample_task(rng, block_m, 'colour', 'training', ('green',)) for _ in range(20)]
    assert {task.goal.block for task in tasks} == {1}
    assert all('green' in task.instruction for task in tasks)
    assert len({task.instruction for task in tasks}) > 1


# Centres of red, green and blue; blue is left-most, red right-most.
CENTRES = np.array([[0.3, 0.1, 0.0], [0.25, 0.0, 0.0], [0.3, -0.1, 0.0]])
FAR = np.array([0.0, 0.0, 0.5])


def state(time_s, tip_m=FAR, blocks=CENTRES):
    return TabletopState(time_s, np.zeros(6), np.zeros(6), np.asarray(tip_m), blocks)


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('wording', ['plain', 'training', 'held_out'])
def test_every_instruction_that_can_be_given_is_found_again(family, wording):
    rng = np.random.default_rng(0)
    for _ in range(20):
        task = sample_task(rng, CENTRES, family, wording)
        assert find_task(task.instruction, CENTRES) == task


def test_the_place_is_that_of_the_scene_at_hand():
    assert find_task('touch the left-most block', CENTRES).goal == Goal(2)
    assert find_task('touch the left-most block', CENTRES[::-1]).goal == Goal(0)


def test_other_words_are_no_task():
    assert find_task('touch the purple block', CENTRES) is None


def test_an_instruction_is_carried_out_when_its_block_is_touched():
    episode = Episode()
    episode.give('touch the green block')
    assert episode.judge(state(4.0)) is None
    assert episode.instruction == 'touch the green block'
    verdict = episode.judge(state(5.5, tip_m=CENTRES[1]))
    assert verdict.outcome.success
    assert verdict.outcome.time_s == pytest.approx(1.5)
    assert episode.instruction is None
    assert episode.judge(state(5.6, tip_m=CENTRES[1])) is None


def test_unknown_words_are_judged_at_once():
    episode = Episode()
    episode.give('paint the table')
    verdict = episode.judge(state(0.0))
    assert (verdict.instruction, verdict.outcome) == ('paint the table', None)


def test_a_reset_forgets_what_was_asked():
    episode = Episode()
    episode.give('touch the green block')
    episode.judge(state(0.0))
    episode.reset()
    assert episode.judge(state(1.0, tip_m=CENTRES[1])) is None


@pytest.mark.parametrize(
    ('successes', 'episodes', 'low', 'high'),
    # Newcombe 1998, table I (81/263, 15/148, 0/20, 1/29).
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_interval_is_wilsons(successes: int, episodes: int, low: float, high: float) -> None:
    assert SuccessRate(successes, episodes).interval() == pytest.approx((low, high), abs=1e-4)


def test_it_prints_what_a_table_needs() -> None:
    assert str(SuccessRate(95, 100)) == '95/100 [89, 98]%'
