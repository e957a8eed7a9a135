"""The text that a policy is prompted with, letter for letter as its training code wrote it.

The advantage tag (RECAP, pi*0.6) is added after cleaning, so cleaning cannot change it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

import numpy as np

from vla_runtime.processing.prompt_layout import STATE, TAG, PromptLayout
from vla_runtime.processing.words import check_word
from vla_runtime.types import Advantage, AdvantageTemplate, PromptCleaning

# 256 bins over [-1, 1]; the last edge is left out, so 1 and all above it fall into bin 255.
_BIN_EDGES = np.linspace(-1, 1, 257)[:-1]
# All but letters, digits, `_` and white space.
_SIGNS = re.compile(r'[^\w\s]')


@dataclass(frozen=True)
class PromptFormat:
    """The `prompt` section of policy.yaml: the form of the prompts.

    Attributes:
        template: name of one of the family's layouts (`Family.templates`).
        cleaning: `openpi` strips the task and turns `_` and newlines into spaces; `lerobot` does
            what `PromptLayout.lerobot_task` says. `python_list` leaves the text as it is and writes
            it as Python writes a list of it: `['pick up the cup']`. `letters` turns the text into
            small letters and leaves out all but letters, digits, `_` and white space. `lower` turns
            the text into small letters.
        advantage: place of the advantage tag; None for a policy trained without one.
        state_bins: numbers of the state in the prompt, where there are more than the state has:
            zeros follow it. None: as many as the state has.
    """

    template: str
    cleaning: PromptCleaning
    advantage: AdvantageTemplate | None = None
    state_bins: int | None = None

    def __post_init__(self) -> None:
        check_word('prompt.cleaning', self.cleaning, PromptCleaning)
        if self.advantage is not None:
            check_word('prompt.advantage', self.advantage, AdvantageTemplate)


def discretise_state(normalised: np.ndarray) -> np.ndarray:
    """Bins of a normalised state, as a prompt holds it: 0 to 255, and -1 below -1.

    Args:
        normalised: (S,) floats, nominally in [-1, 1].

    Returns:
        (S,) int64 in -1 ... 255: `digitize(x, linspace(-1, 1, 257)[:-1]) - 1`.

    Raises:
        ValueError: not one-dimensional, empty, or not finite.
    """
    normalised = np.asarray(normalised)
    if normalised.ndim != 1 or normalised.size == 0:
        raise ValueError(
            f'state must be one row of numbers, got an array of shape {normalised.shape}'
        )
    bad = np.flatnonzero(~np.isfinite(normalised))
    if bad.size:
        raise ValueError(
            f'state has {normalised[bad[0]]} at index {bad[0]} ({bad.size} of {normalised.size} '
            'values are not finite): check the joint driver and the normaliser statistics'
        )
    return (np.digitize(normalised, _BIN_EDGES) - 1).astype(np.int64)


def prompt_parts(
    layout: PromptLayout,
    fmt: PromptFormat,
    task: str,
    normalised_state: np.ndarray | None,
    advantage: Advantage | None = None,
) -> tuple[str, str, str]:
    """Write the prompt of one row, from the images, if there are any, to its end.

    Args:
        layout: layout of the template.
        fmt: the bundle's prompt format.
        task: the instruction in plain words.
        normalised_state: (S,) state after the normaliser; only a layout with `{state}` reads it.
        advantage: the tag of a guided row; None for a row without a tag.

    Returns:
        text before the task, the task, text behind it. With a tag: `task_newline` puts it on a
        line of its own after the task, `in_task_space` after the task and a space, `before_action`
        on the line that the layout has for it (`{tag}`), else as `task_newline`.

    Raises:
        ValueError: an empty instruction, a missing, empty or non-finite state, a tag for a format
            without a place for it.
    """
    text, tag_line = _clean(layout, fmt, task), ''
    before, after = layout.around_task
    if advantage is not None:
        place, tag = _advantage_place(fmt), _advantage_tag(advantage)
        # A newline that the caller left at the end would push the tag a line down.
        text = text.rstrip('\n')
        if place == 'before_action' and TAG in after:
            tag_line = f'{tag};\n'
        else:
            text = f'{text} {tag}' if place == 'in_task_space' else f'{text}\n{tag}'
    if fmt.cleaning == 'python_list':
        text = str([text])
    if layout.has_state:
        after = after.replace(STATE, _state_words(normalised_state, fmt.state_bins))
    after = after.replace(TAG, tag_line)
    # A task that ends with a newline has the layout's: there is one, not two.
    return before, text, after[1:] if text.endswith('\n') and after.startswith('\n') else after


def build_prompt(
    layout: PromptLayout,
    fmt: PromptFormat,
    task: str,
    normalised_state: np.ndarray | None,
    advantage: Advantage | None = None,
) -> str:
    """Write the prompt of one row as one text; arguments and errors are those of `prompt_parts`."""
    return ''.join(prompt_parts(layout, fmt, task, normalised_state, advantage))


def _clean(layout: PromptLayout, fmt: PromptFormat, task: str) -> str:
    if not isinstance(task, str):
        raise ValueError(f'instruction must be text, got {type(task).__name__}')
    cleaned = task.strip().replace('_', ' ').replace('\n', ' ')
    if not cleaned.strip():
        raise ValueError(
            f'instruction is empty (got {task!r}): say in plain words what the robot is to do'
        )
    if fmt.cleaning == 'letters':
        words = _SIGNS.sub('', task.lower())
        if not words.strip():
            raise ValueError(
                f'instruction has neither letters nor digits (got {task!r}): say in plain words '
                'what the robot is to do'
            )
        return words
    if fmt.cleaning == 'lower':
        return task.lower()
    if fmt.cleaning == 'openpi' or layout.lerobot_task == 'cleaned':
        return cleaned
    return task.strip() if layout.lerobot_task == 'stripped' else task


def _state_words(normalised_state: np.ndarray | None, bins: int | None) -> str:
    if normalised_state is None:
        raise ValueError(
            'this prompt.template writes the state into the prompt, but no state was given; a '
            'checkpoint trained without it has another template'
        )
    normalised_state = np.asarray(normalised_state)
    if bins is not None and normalised_state.ndim == 1:
        normalised_state = np.pad(normalised_state, (0, max(0, bins - len(normalised_state))))
    return ' '.join(str(number) for number in discretise_state(normalised_state))


def _advantage_place(fmt: PromptFormat) -> AdvantageTemplate:
    if fmt.advantage is None:
        raise ValueError(
            'an advantage was asked for, but this bundle does not say where its tag goes: if the '
            "checkpoint was trained with one, set prompt.advantage in the bundle's policy.yaml to "
            f'one of {", ".join(get_args(AdvantageTemplate))}; if not, switch guidance off'
        )
    return fmt.advantage


def _advantage_tag(advantage: Advantage) -> str:
    check_word('advantage', advantage, Advantage)
    return f'Advantage: {advantage}'
