"""The text that a policy is prompted with, letter for letter as its training code wrote it.

Templates:
- `pi05_state`: `Task: {task}, State: {bins};\\nAction: `, the state as 256 bins (LeRobot, openpi).
- `pi05`: `Task: {task};\\nAction: `, LeRobot's layout for a pi0.5 whose state is not in the prompt.
- `pi0`: `{task}\\n`. Also right for pi0.5 checkpoints that *openpi* trained without state in the
  prompt (`discrete_state_input=False`, as in `pi05_libero`): openpi's tokenizer then falls back
  to pi0's layout.
- `task_line`: `{task}\\n` without the vocabulary's BOS in front of it.
- `after_images`: `\\n{task}` without BOS: a line of its own behind the text that the network puts
  around the images (InternVL3).
- `chat`: `{task}` inside a layout that the bundle holds (`processing.chat`); no BOS.

The advantage tag (RECAP, pi*0.6) is added after cleaning, so cleaning cannot change it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

import numpy as np

from vla_runtime.processing.words import check_word
from vla_runtime.types import Advantage, AdvantageTemplate, PromptCleaning, PromptTemplate

# 256 bins over [-1, 1]; the last edge is left out, so 1 and all above it fall into bin 255.
_BIN_EDGES = np.linspace(-1, 1, 257)[:-1]
# The task on a line of its own, and nothing else.
_LINES: tuple[PromptTemplate, ...] = ('pi0', 'task_line', 'after_images')
# All but letters, digits, `_` and white space.
_SIGNS = re.compile(r'[^\w\s]')
_WITHOUT_BOS: tuple[PromptTemplate, ...] = ('task_line', 'after_images', 'chat')


@dataclass(frozen=True)
class PromptFormat:
    """The `prompt` section of policy.yaml: the form of the prompts.

    Attributes:
        template: the layout, see the module's docstring.
        cleaning: `openpi` strips the task and turns `_` and newlines into spaces; `lerobot` leaves
            the text of the templates `pi0`, `task_line` and `chat` as it is, and strips that of
            `after_images`. The pi0.5 templates are always cleaned, since both code bases do so.
            `python_list`, for `chat`, leaves the text as it is and writes it as Python writes a
            list of it: `['pick up the cup']`. `letters`, for `chat`, turns the text into small
            letters and leaves out all but letters, digits, `_` and white space.
        advantage: where the advantage tag goes; None for a policy trained without one.
    """

    template: PromptTemplate
    cleaning: PromptCleaning
    advantage: AdvantageTemplate | None

    def __post_init__(self) -> None:
        check_word('prompt.template', self.template, PromptTemplate)
        check_word('prompt.cleaning', self.cleaning, PromptCleaning)
        if self.advantage is not None:
            check_word('prompt.advantage', self.advantage, AdvantageTemplate)


def starts_with_bos(template: PromptTemplate) -> bool:
    """True when the vocabulary's BOS stands in front of the prompt."""
    return template not in _WITHOUT_BOS


def discretise_state(normalised: np.ndarray) -> np.ndarray:
    """Bins of a normalised state, as pi0.5 reads them: 0 to 255, and -1 below -1.

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


def build_prompt(
    fmt: PromptFormat,
    task: str,
    normalised_state: np.ndarray | None,
    advantage: Advantage | None = None,
) -> str:
    """Write the prompt of one row.

    Args:
        fmt: the bundle's prompt format.
        task: the instruction in plain words.
        normalised_state: (S,) state after the normaliser; only `pi05_state` reads it.
        advantage: the tag of a guided row; None for a row without a tag.

    Returns:
        The text to tokenise. With a tag: `task_newline` puts it on a line of its own after the
        task, `in_task_space` after the task and a space, `before_action` on a line of its own
        directly before `Action: ` (without that word in the template: as the last line).

    Raises:
        ValueError: an empty instruction, a missing, empty or non-finite state, a tag for a format
            without a place for it.
    """
    text = _clean(fmt, task)
    place, tag = None, ''
    if advantage is not None:
        place, tag = _advantage_place(fmt), _advantage_tag(advantage)
        # A newline that the caller left at the end would push the tag a line down.
        text = text.rstrip('\n')
    if place == 'task_newline' or (place == 'before_action' and fmt.template in (*_LINES, 'chat')):
        text = f'{text}\n{tag}'
    elif place == 'in_task_space':
        text = f'{text} {tag}'

    if fmt.template == 'chat':
        return str([text]) if fmt.cleaning == 'python_list' else text
    if fmt.template == 'after_images':
        return f'\n{text}'
    if fmt.template in _LINES:
        return text if text.endswith('\n') else f'{text}\n'
    if fmt.template == 'pi05_state':
        text = f'{text}, State: {_state_words(normalised_state)}'
    line_before_action = f'{tag};\n' if place == 'before_action' else ''
    return f'Task: {text};\n{line_before_action}Action: '


def _clean(fmt: PromptFormat, task: str) -> str:
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
    if fmt.template in (*_LINES, 'chat') and fmt.cleaning != 'openpi':
        return task.strip() if fmt.template == 'after_images' else task
    return cleaned


def _state_words(normalised_state: np.ndarray | None) -> str:
    if normalised_state is None:
        raise ValueError(
            "prompt template 'pi05_state' writes the state into the prompt, but no state was "
            "given; a checkpoint trained without it has prompt.template 'pi05' or 'pi0'"
        )
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
