"""Instructions found again from their words, and judged one after the other."""

import numpy as np
import pytest

from vla_tabletop.sim.episode import Episode, find_task
from vla_tabletop.sim.tasks import FAMILIES, Goal, sample_task
from vla_tabletop.sim.world import TabletopState

# Centres of red, green and blue; blue is left-most, red right-most.
BLOCKS = np.array([[0.3, 0.1, 0.0], [0.25, 0.0, 0.0], [0.3, -0.1, 0.0]])
FAR = np.array([0.0, 0.0, 0.5])


def state(time_s, tip_m=FAR, blocks=BLOCKS):
    return TabletopState(time_s, np.zeros(6), np.zeros(6), np.asarray(tip_m), blocks)


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('wording', ['plain', 'training', 'held_out'])
def test_every_instruction_that_can_be_given_is_found_again(family, wording):
    rng = np.random.default_rng(0)
    for _ in range(20):
        task = sample_task(rng, BLOCKS, family, wording)
        assert find_task(task.instruction, BLOCKS) == task


def test_the_place_is_that_of_the_scene_at_hand():
    assert find_task('touch the left-most block', BLOCKS).goal == Goal(2)
    assert find_task('touch the left-most block', BLOCKS[::-1]).goal == Goal(0)


def test_other_words_are_no_task():
    assert find_task('touch the purple block', BLOCKS) is None


def test_an_instruction_is_carried_out_when_its_block_is_touched():
    episode = Episode()
    episode.give('touch the green block')
    assert episode.judge(state(4.0)) is None
    assert episode.instruction == 'touch the green block'
    verdict = episode.judge(state(5.5, tip_m=BLOCKS[1]))
    assert verdict.outcome.success
    assert verdict.outcome.time_s == pytest.approx(1.5)
    assert episode.instruction is None
    assert episode.judge(state(5.6, tip_m=BLOCKS[1])) is None


def test_the_wrong_block_and_the_time_limit_end_it():
    episode = Episode()
    episode.give('touch the green block')
    assert episode.judge(state(0.0, tip_m=BLOCKS[0])).outcome.name == 'wrong_block'
    episode.give('touch the green block')
    assert episode.judge(state(10.0)) is None
    assert episode.judge(state(16.0)).outcome.name == 'timeout'


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
    assert episode.judge(state(1.0, tip_m=BLOCKS[1])) is None
