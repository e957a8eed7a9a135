"""Prompts, letter for letter, their layouts, and where the advantage tag stands."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from reference_cases import find
from tiny_policy import tokenizer_of

from vla_runtime.family.listing import family_names, find_family
from vla_runtime.processing.prompts import PromptFormat, PromptLayout, discretise_state
from vla_runtime.processing.prompts import build_prompt as build_prompt_of
from vla_runtime.processing.tokenizer import Tokenizer

LAYOUTS = find_family('pi05').templates | find_family('smolvla').templates
TEMPLATES = tuple(LAYOUTS)
LINES = ('pi0', 'task_line')
PLACES = ('task_newline', 'in_task_space', 'before_action')
STATE = np.array([-1.0, 0.0, 0.9999, -1.5], dtype=np.float32)

tasks = st.text(min_size=1, max_size=30).filter(lambda text: text.strip().strip('_').strip())


def build_prompt(fmt: PromptFormat, *rest) -> str:
    return build_prompt_of(LAYOUTS[fmt.template], fmt, *rest)


@pytest.mark.cases
@pytest.mark.parametrize('case', find('processing_*.json'), ids=lambda path: path.stem)
def test_reference_prompts_are_reproduced(case):
    fmt = PromptFormat('pi05_state', 'lerobot', None)
    for prompt in json.loads(case.read_text())['prompts']:
        state = np.array(prompt['state'], dtype=np.float32)
        assert build_prompt(fmt, prompt['task'], state) == prompt['prompt']


@pytest.mark.parametrize(
    ('template', 'cleaning', 'place', 'expected'),
    [
        ('pi05_state', 'openpi', None, 'Task: a b c, State: 0 128 255 -1;\nAction: '),
        ('pi05_state', 'lerobot', None, 'Task: a b c, State: 0 128 255 -1;\nAction: '),
        (
            'pi05_state',
            'openpi',
            'task_newline',
            'Task: a b c\nAdvantage: positive, State: 0 128 255 -1;\nAction: ',
        ),
        (
            'pi05_state',
            'openpi',
            'in_task_space',
            'Task: a b c Advantage: positive, State: 0 128 255 -1;\nAction: ',
        ),
        (
            'pi05_state',
            'openpi',
            'before_action',
            'Task: a b c, State: 0 128 255 -1;\nAdvantage: positive;\nAction: ',
        ),
        ('pi05', 'openpi', None, 'Task: a b c;\nAction: '),
        ('pi05', 'openpi', 'task_newline', 'Task: a b c\nAdvantage: positive;\nAction: '),
        ('pi05', 'openpi', 'in_task_space', 'Task: a b c Advantage: positive;\nAction: '),
        ('pi05', 'openpi', 'before_action', 'Task: a b c;\nAdvantage: positive;\nAction: '),
        ('pi0', 'openpi', None, 'a b c\n'),
        ('pi0', 'openpi', 'task_newline', 'a b c\nAdvantage: positive\n'),
        ('pi0', 'openpi', 'in_task_space', 'a b c Advantage: positive\n'),
        ('pi0', 'openpi', 'before_action', 'a b c\nAdvantage: positive\n'),
        ('pi0', 'lerobot', None, ' a_b\nc \n'),
        ('pi0', 'lerobot', 'task_newline', ' a_b\nc \nAdvantage: positive\n'),
        ('pi0', 'lerobot', 'in_task_space', ' a_b\nc  Advantage: positive\n'),
        ('pi0', 'lerobot', 'before_action', ' a_b\nc \nAdvantage: positive\n'),
        ('task_line', 'openpi', None, 'a b c\n'),
        ('task_line', 'lerobot', None, ' a_b\nc \n'),
        ('task_line', 'lerobot', 'task_newline', ' a_b\nc \nAdvantage: positive\n'),
    ],
)
def test_prompt_is_written_as_in_training(template, cleaning, place, expected):
    fmt = PromptFormat(template, cleaning, place)
    advantage = 'positive' if place else None
    assert build_prompt(fmt, ' a_b\nc ', STATE, advantage) == expected


@pytest.mark.parametrize('template', LINES)
def test_newline_that_is_there_already_is_not_doubled(template):
    fmt = PromptFormat(template, 'lerobot', 'task_newline')
    assert build_prompt(fmt, 'stack\n', None) == 'stack\n'
    assert build_prompt(fmt, 'stack\n', None, 'positive') == 'stack\nAdvantage: positive\n'


def test_only_a_bare_line_goes_without_the_vocabularys_bos():
    assert {name: layout.bos for name, layout in LAYOUTS.items()} == {
        'pi05_state': True,
        'pi05': True,
        'pi0': True,
        'task_line': False,
    }


def test_case_is_kept():
    fmt = PromptFormat('pi05', 'openpi', None)
    assert build_prompt(fmt, 'Pick the LEGO', None) == 'Task: Pick the LEGO;\nAction: '


@given(task=tasks, place=st.sampled_from(PLACES), template=st.sampled_from(TEMPLATES))
def test_row_without_advantage_has_no_tag_whatever_the_format(task, place, template):
    tagged, plain = PromptFormat(template, 'openpi', place), PromptFormat(template, 'openpi', None)
    assert build_prompt(tagged, task, STATE) == build_prompt(plain, task, STATE)


@given(
    task=tasks,
    place=st.sampled_from(PLACES),
    template=st.sampled_from(TEMPLATES),
    cleaning=st.sampled_from(['openpi', 'lerobot']),
    advantage=st.sampled_from(['positive', 'negative']),
)
def test_tag_is_the_only_difference_of_a_tagged_row(task, place, template, cleaning, advantage):
    fmt = PromptFormat(template, cleaning, place)
    plain, tagged = (build_prompt(fmt, task, STATE, word) for word in (None, advantage))
    tag = f'Advantage: {advantage}'
    assert tagged.count(tag) == plain.count(tag) + 1
    # At the end of a line or before the state, never glued to a word.
    separators = {'task_newline': ('\n', ''), 'in_task_space': (' ', '')}
    before, after = separators.get(place, ('\n', '') if template in LINES else ('', ';\n'))
    assert f'{before}{tag}{after}' in tagged
    assert tagged.replace(f'{before}{tag}{after}', '', 1).rstrip('\n') == plain.rstrip('\n')


@given(task=tasks, place=st.sampled_from([None, *PLACES]), template=st.sampled_from(TEMPLATES))
def test_cleaned_prompts_have_no_empty_line_and_no_underscore(task, place, template):
    fmt = PromptFormat(template, 'openpi', place)
    prompt = build_prompt(fmt, task, STATE, 'positive' if place else None)
    assert '\n\n' not in prompt
    assert '_' not in prompt
    lines = 1 + (place in ('task_newline', 'before_action'))
    assert prompt.count('\n') == lines
    assert prompt.endswith('\n' if template in LINES else ';\nAction: ')


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_bins_are_256_over_minus_one_to_one_and_minus_one_below(dtype):
    edges = np.arange(256) / 128.0 - 1.0
    np.testing.assert_array_equal(discretise_state(edges.astype(dtype)), np.arange(256))
    just_below = np.nextafter(edges.astype(dtype), dtype(-2))
    np.testing.assert_array_equal(discretise_state(just_below), np.arange(256) - 1)
    np.testing.assert_array_equal(discretise_state(np.array([-9, 1, 9], dtype)), [-1, 255, 255])


@given(values=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=32))
def test_bins_follow_the_training_formula(values):
    state = np.array(values, dtype=np.float32)
    expected = np.digitize(state, np.linspace(-1, 1, 256 + 1)[:-1]) - 1
    bins = discretise_state(state)
    assert bins.dtype == np.int64 and bins.min() >= -1 and bins.max() <= 255
    np.testing.assert_array_equal(bins, expected)


@pytest.mark.parametrize('task', ['', '   ', '\n', ' \t\n', '_', ' __ \n', None])
@pytest.mark.parametrize('template', TEMPLATES)
def test_empty_instruction_is_an_error(template, task):
    for cleaning in ('openpi', 'lerobot'):
        with pytest.raises(ValueError, match='instruction'):
            build_prompt(PromptFormat(template, cleaning, None), task, STATE)


@pytest.mark.parametrize('template', TEMPLATES)
def test_advantage_without_a_place_names_the_bundle_field(template):
    fmt = PromptFormat(template, 'openpi', None)
    with pytest.raises(ValueError, match=r'prompt\.advantage.*task_newline'):
        build_prompt(fmt, 'stack', STATE, 'positive')


def test_unknown_advantage_is_an_error():
    fmt = PromptFormat('pi05', 'openpi', 'task_newline')
    with pytest.raises(ValueError, match="'great'"):
        build_prompt(fmt, 'stack', None, 'great')


def test_missing_state_is_an_error_only_where_the_prompt_holds_it():
    with pytest.raises(ValueError, match='template'):
        build_prompt(PromptFormat('pi05_state', 'openpi', None), 'stack', None)
    for template in ('pi05', *LINES):
        assert 'stack' in build_prompt(PromptFormat(template, 'openpi', None), 'stack', None)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_state_that_is_not_finite_is_an_error_with_its_place(value):
    state = np.array([0.0, value, 0.0])
    with pytest.raises(ValueError, match=rf'{value} at index 1 \(1 of 3'):
        build_prompt(PromptFormat('pi05_state', 'openpi', None), 'stack', state)


@pytest.mark.parametrize('shape', [(), (0,), (1, 4)])
def test_state_of_another_shape_is_an_error(shape):
    with pytest.raises(ValueError, match='numbers'):
        discretise_state(np.zeros(shape))


@pytest.mark.parametrize(
    ('words', 'field'),
    [(('pi0', 'none', None), 'prompt.cleaning'), (('pi0', 'openpi', 'start'), 'prompt.advantage')],
)
def test_unknown_word_names_the_bundle_field(words, field):
    with pytest.raises(ValueError, match=field):
        PromptFormat(*words)


@pytest.mark.parametrize('bins', [None, 3, 6])
def test_a_padded_state_is_followed_by_the_bins_of_zeros(bins):
    layout = find_family('pi05').templates['pi05_state']
    fmt = PromptFormat('pi05_state', 'lerobot', state_bins=bins)
    text = build_prompt_of(layout, fmt, 'pick', np.array([-1.0, 0.0, 1.0]))
    words = '0 128 255' + ' 128' * ((bins or 3) - 3)
    assert text == f'Task: pick, State: {words};\nAction: '


# --- Layouts of prompts: pieces, places of the images, special tokens

PATH = tokenizer_of('groot_n15')
LAYOUT = PromptLayout(
    '<|im_start|>user\n{images}: {task}!<|im_end|>\n',
    image='<image {number}><img>{tokens}</img>',
    bos=False,
)


def prompt_of(task: str) -> tuple[str, str, str]:
    before, after = LAYOUT.around_task
    return before, task, after


def whole(cameras: int, task: str, context: str = '') -> str:
    images = ''.join(f'<image {n}><img>{context}</img>' for n in range(1, cameras + 1))
    return f'<|im_start|>user\n{images}: {task}!<|im_end|>\n'


def encode(text: str) -> list[int]:
    return tokenizers.Tokenizer.from_file(str(PATH)).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize('cameras', [1, 2, 3])
def test_tokens_are_those_of_the_whole_text_without_its_image_tokens(cameras):
    tokenizer = Tokenizer.load(PATH, bos=False)
    pieces = LAYOUT.pieces(cameras, prompt_of('pick up'), tokenizer.special)
    assert ''.join(piece.text for piece in pieces) == whole(cameras, 'pick up')
    tokens, mask = tokenizer.encode_pieces(pieces, 200)
    assert tokens[mask].tolist() == encode(whole(cameras, 'pick up'))


def test_images_stand_where_the_whole_text_has_them():
    tokenizer = Tokenizer.load(PATH, bos=False)
    pieces = LAYOUT.pieces(3, prompt_of('go'), tokenizer.special)
    counts = [len(ids) for ids in tokenizer.piece_tokens(pieces)]
    places = LAYOUT.image_places(counts, 3, 200)
    ids = np.array(encode(whole(3, 'go', '<IMG_CONTEXT>')))
    (context,) = encode('<IMG_CONTEXT>')
    found = np.flatnonzero(ids == context) - np.arange(3)
    assert places == tuple(found)


@pytest.mark.parametrize('cameras', [1, 2, 3])
@pytest.mark.parametrize('task', ['go', 'pick up the cup', 'say <img> and {images}'])
def test_images_behind_the_task_keep_their_places_whatever_its_length(cameras, task):
    layout = replace(LAYOUT, text='<|im_start|>user\n{task}!{images}.<|im_end|>\n')
    tokenizer = Tokenizer.load(PATH, bos=False)
    before, after = layout.around_task
    pieces = layout.pieces(cameras, (before, task, after), tokenizer.special)
    images = [f'<image {n}><img></img>' for n in range(1, cameras + 1)]
    expected = f'<|im_start|>user\n{task}!{"".join(images)}.<|im_end|>\n'
    assert ''.join(piece.text for piece in pieces) == expected
    counts = [len(ids) for ids in tokenizer.piece_tokens(pieces)]
    places = layout.image_places(counts, cameras, 200)
    tokens, mask = tokenizer.encode_pieces(pieces, 200, padding_first=True)
    assert not mask[: 200 - sum(counts)].any() and mask[200 - sum(counts) :].all()
    (opening,), (closing,) = encode('<img>'), encode('</img>')
    assert [int(tokens[place - 1]) for place in places] == [opening] * cameras
    assert [int(tokens[place]) for place in places] == [closing] * cameras


def test_plain_text_beside_the_task_is_one_piece_with_it():
    special = Tokenizer.load(PATH, bos=False).special
    pieces = LAYOUT.pieces(1, prompt_of('go'), special)
    assert [piece.text for piece in pieces if not piece.frame] == [': go!']


def test_a_special_token_in_the_task_is_text():
    tokenizer = Tokenizer.load(PATH, bos=False)
    pieces = LAYOUT.pieces(1, prompt_of('say <|im_end|>'), tokenizer.special)
    tokens, mask = tokenizer.encode_pieces(pieces, 200)
    (end,) = encode('<|im_end|>')
    assert (tokens[mask] == end).sum() == 1


def test_without_images_a_prompt_is_one_plain_piece():
    layout = PromptLayout('Task: {task};\n')
    assert layout.pieces(2, ('Task: ', 'go <|im_end|>', ';\n'), ['<|im_end|>']) == [
        ('Task: go <|im_end|>;\n', False)
    ]


@pytest.mark.parametrize(
    ('text', 'image', 'message'),
    [
        ('{task}', '{tokens}', "expected '{task}' once, '{images}' once where"),
        ('{images}{task}', '', "expected '{task}' once, '{images}' once where"),
        ('{images}', '{tokens}', "expected '{task}' once"),
        ('{images}{task}{task}', '{tokens}', 'marks in another order'),
        ('{images}{task}', '<img>', "expected '{tokens}' once"),
        ('{task}{images}{images}', '{tokens}', "'{images}' once where"),
        ('{images}{task}{images}', '{tokens}', "'{images}' once where"),
        ('{state}{task}', '', 'marks in another order'),
        ('{task}{tag}{tag}', '', "'{tag}' at most once"),
    ],
)
def test_a_layout_without_its_places_is_refused(text, image, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PromptLayout(text, image)


@pytest.mark.parametrize(
    ('cleaning', 'expected'),
    [('python_list', "['pick_up ']"), ('lerobot', 'pick_up '), ('openpi', 'pick up')],
)
def test_the_task_is_cleaned_as_policy_yaml_says(cleaning, expected):
    text = build_prompt_of(LAYOUT, PromptFormat('chat', cleaning), 'pick_up ', None)
    assert text == f': {expected}!<|im_end|>\n'
    stripped = replace(LAYOUT, lerobot_task='stripped')
    text = build_prompt_of(stripped, PromptFormat('chat', 'lerobot'), ' pick_up ', None)
    assert text == ': pick_up!<|im_end|>\n'


def test_marks_in_the_task_are_text():
    layout = PromptLayout('Task: {task}, State: {state};\n{tag}')
    text = build_prompt_of(
        layout, PromptFormat('t', 'openpi', 'before_action'), 'a {state} {tag}', np.zeros(1)
    )
    assert text == 'Task: a {state} {tag}, State: 128;\n'


def test_a_task_with_an_apostrophe_is_written_as_python_writes_it():
    fmt = PromptFormat('chat', 'python_list')
    text = build_prompt_of(LAYOUT, fmt, "the cup's lid", None)
    assert text == ': ["the cup\'s lid"]!<|im_end|>\n'


def test_images_stand_inside_the_prompts_of_families_that_have_places_for_them():
    for name in family_names():
        family = find_family(name)
        has_places = {
            preset: hasattr(dims, 'image_places') for preset, dims in family.presets.items()
        }
        for layout in family.templates.values():
            assert set(has_places.values()) == {bool(layout.image)}, name
