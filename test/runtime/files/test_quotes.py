"""Foreign text and numbers of bytes are quoted on one short line."""

import pytest

from vla_runtime.files.quotes import one_line, quoted, size_text


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        ('elbow', "'elbow'"),
        ('a\nb\x1b[31m', r"'a\nb\x1b[31m'"),
        (2.5, '2.5'),
        (None, 'None'),
        ({'a': 1}, 'a mapping'),
        ([1] * 1000, 'a list'),
        pytest.param(10**5000, 'a whole number of 16610 bits', id='huge'),
        ('x' * 30 + 'y' * 1000 + 'z' * 30, f"'{'x' * 30}' … '{'z' * 30}' (1060 characters)"),
    ],
)
def test_a_value_is_quoted_as_python_writes_it_and_never_at_length(value, text):
    assert quoted(value) == text


def test_a_message_is_one_line_of_what_can_be_printed():
    assert one_line(' a\n\n b\x00\tc ', 100) == 'a b c'


@pytest.mark.parametrize(
    'text', ['x' * 10_000, 'a b ' * 10_000, ' ' * 10_000 + 'end', '\x00' * 999]
)
def test_the_middle_of_a_long_message_is_left_out(text):
    line = one_line(text, 100)
    assert len(line) <= 103
    assert '\n' not in line


# --- Numbers of bytes in words


@pytest.mark.parametrize(
    ('count', 'text'),
    [
        (0, '0 bytes'),
        (999, '999 bytes'),
        (1_500, '1.5 kB'),
        (45_000, '45 kB'),
        (56_400_000, '56 MB'),
        (6_200_000_000, '6.2 GB'),
        (14_000_000_000, '14 GB'),
        (1_200_000_000_000, '1,200 GB'),
    ],
)
def test_a_size_is_never_zero_of_a_large_unit(count, text):
    assert size_text(count) == text
