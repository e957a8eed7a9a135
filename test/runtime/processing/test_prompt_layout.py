"""Layouts of prompts: pieces, places of the images, special tokens."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from tiny_policy import tokenizer_of

from vla_runtime.family.listing import family_names, find_family
from vla_runtime.processing.prompts import PromptFormat, PromptLayout, build_prompt
from vla_runtime.processing.tokenizer import Tokenizer

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
    [
        ('python_list', "['pick_up ']"),
        ('lerobot', 'pick_up '),
        ('openpi', 'pick up'),
    ],
)
def test_the_task_is_cleaned_as_policy_yaml_says(cleaning, expected):
    text = build_prompt(LAYOUT, PromptFormat('chat', cleaning), 'pick_up ', None)
    assert text == f': {expected}!<|im_end|>\n'
    stripped = replace(LAYOUT, lerobot_task='stripped')
    text = build_prompt(stripped, PromptFormat('chat', 'lerobot'), ' pick_up ', None)
    assert text == ': pick_up!<|im_end|>\n'


def test_marks_in_the_task_are_text():
    layout = PromptLayout('Task: {task}, State: {state};\n{tag}')
    text = build_prompt(
        layout, PromptFormat('t', 'openpi', 'before_action'), 'a {state} {tag}', np.zeros(1)
    )
    assert text == 'Task: a {state} {tag}, State: 128;\n'


def test_a_task_with_an_apostrophe_is_written_as_python_writes_it():
    fmt = PromptFormat('chat', 'python_list')
    text = build_prompt(LAYOUT, fmt, "the cup's lid", None)
    assert text == ': ["the cup\'s lid"]!<|im_end|>\n'


def test_images_stand_inside_the_prompts_of_families_that_have_places_for_them():
    for name in family_names():
        family = find_family(name)
        has_places = {
            preset: hasattr(dims, 'image_places') for preset, dims in family.presets.items()
        }
        for layout in family.templates.values():
            assert set(has_places.values()) == {bool(layout.image)}, name
