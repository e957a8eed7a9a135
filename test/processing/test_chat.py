"""Prompts in the form of a chat: pieces, places of the images, special tokens."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from tiny_policy import tokenizer_of

from vla_runtime.processing.chat import ChatLayout, chat_pieces, image_places_of
from vla_runtime.processing.prompts import PromptFormat, build_prompt
from vla_runtime.processing.tokenizer import Tokenizer

PATH = tokenizer_of('groot_n15')
LAYOUT = ChatLayout(
    frame='<|im_start|>user{newline}{images}: {task}!<|im_end|>{newline}',
    image='<image {number}><img>{tokens}</img>',
)


def whole(cameras: int, task: str, context: str = '') -> str:
    images = ''.join(f'<image {n}><img>{context}</img>' for n in range(1, cameras + 1))
    return f'<|im_start|>user\n{images}: {task}!<|im_end|>\n'


def encode(text: str) -> list[int]:
    return tokenizers.Tokenizer.from_file(str(PATH)).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize('cameras', [1, 2, 3])
def test_tokens_are_those_of_the_whole_text_without_its_image_tokens(cameras):
    tokenizer = Tokenizer.load(PATH, bos=False)
    pieces = chat_pieces(LAYOUT, cameras, 'pick up', tokenizer.special)
    assert ''.join(piece.text for piece in pieces) == whole(cameras, 'pick up')
    tokens, mask = tokenizer.encode_pieces(pieces, 200)
    assert tokens[mask].tolist() == encode(whole(cameras, 'pick up'))


def test_images_stand_where_the_whole_text_has_them():
    tokenizer = Tokenizer.load(PATH, bos=False)
    counts = [
        len(ids) for ids in tokenizer.piece_tokens(chat_pieces(LAYOUT, 3, 'go', tokenizer.special))
    ]
    places = image_places_of(counts, 3)
    ids = np.array(encode(whole(3, 'go', '<IMG_CONTEXT>')))
    (context,) = encode('<IMG_CONTEXT>')
    found = np.flatnonzero(ids == context) - np.arange(3)
    assert places == tuple(found)


def test_plain_text_beside_the_task_is_one_piece_with_it():
    special = Tokenizer.load(PATH, bos=False).special
    texts = [piece.text for piece in chat_pieces(LAYOUT, 1, 'go', special) if not piece.frame]
    assert texts == [': go!']


def test_a_special_token_in_the_task_is_text():
    tokenizer = Tokenizer.load(PATH, bos=False)
    tokens, mask = tokenizer.encode_pieces(
        chat_pieces(LAYOUT, 1, 'say <|im_end|>', tokenizer.special), 200
    )
    (end,) = encode('<|im_end|>')
    assert (tokens[mask] == end).sum() == 1


@pytest.mark.parametrize(
    ('frame', 'image', 'message'),
    [
        ('{task}', '{tokens}', r"prompt.frame has '\{images\}' 0 times"),
        ('{images}{task}{task}', '{tokens}', r"prompt.frame has '\{task\}' 2 times"),
        ('{images}{task}', '<img>', r"prompt.image has '\{tokens\}' 0 times"),
        ('{task}{images}', '{tokens}', r"'\{task\}' before '\{images\}'"),
    ],
)
def test_a_layout_without_its_places_is_refused(frame, image, message):
    with pytest.raises(ValueError, match=message):
        ChatLayout(frame, image)


@pytest.mark.parametrize(
    ('cleaning', 'expected'),
    [
        ('python_list', "['pick_up ']"),
        ('lerobot', 'pick_up '),
        ('openpi', 'pick up'),
    ],
)
def test_the_task_is_cleaned_as_policy_yaml_says(cleaning, expected):
    assert build_prompt(PromptFormat('chat', cleaning, None), 'pick_up ', None) == expected


def test_a_task_with_an_apostrophe_is_written_as_python_writes_it():
    fmt = PromptFormat('chat', 'python_list', None)
    assert build_prompt(fmt, "the cup's lid", None) == '["the cup\'s lid"]'
