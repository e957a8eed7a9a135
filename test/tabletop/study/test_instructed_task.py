"""Instructions that the robot gets under the controls."""

import numpy as np
import pytest

from vla_tabletop.sim.instructions import find_task
from vla_tabletop.sim.scene import sample_scene
from vla_tabletop.sim.tasks import sample_task
from vla_tabletop.study.instructed_task import FIXED_INSTRUCTION, instructed_task


@pytest.mark.parametrize('family', ['colour', 'position'])
def test_the_other_task_names_another_block_of_the_same_scene(family):
    for seed in range(30):
        blocks = sample_scene(seed).block_xy_m
        task = sample_task(np.random.default_rng(seed), blocks, family)
        instructed = instructed_task('other_block', task, blocks, seed)
        meant = find_task(instructed.instruction, blocks)
        assert meant.family == family
        assert meant.goal.block == instructed.block != task.goal.block
        assert instructed == instructed_task('other_block', task, blocks, seed)


def test_the_fixed_sentence_is_right_in_a_third_of_the_tasks():
    right = 0
    for seed in range(300):
        blocks = sample_scene(seed).block_xy_m
        task = sample_task(np.random.default_rng(seed), blocks, ('colour', 'position')[seed % 2])
        instructed = instructed_task('fixed', task, blocks, seed)
        assert instructed.instruction == FIXED_INSTRUCTION
        right += instructed.block == task.goal.block
    assert 70 <= right <= 130


def test_the_task_itself_is_passed_on_in_its_own_words():
    blocks = sample_scene(3).block_xy_m
    task = sample_task(np.random.default_rng(3), blocks, 'colour', 'held_out')
    instructed = instructed_task('task', task, blocks, 3)
    assert (instructed.instruction, instructed.block) == (task.instruction, task.goal.block)
