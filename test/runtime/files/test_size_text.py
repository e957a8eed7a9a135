"""Numbers of bytes in words."""

from __future__ import annotations

import pytest

from vla_runtime.files.quotes import size_text


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
