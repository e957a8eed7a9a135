"""Folders of families that are broken, or that declare what another one declares."""

from __future__ import annotations

import sys

import pytest

from vla_runtime import declarations
from vla_runtime.family import listing


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder of a further family, found beside the package's own."""
    monkeypatch.setattr(declarations, '__path__', [*declarations.__path__, str(tmp_path)])
    monkeypatch.setattr(listing, '_reported', set())
    yield tmp_path / 'half_written.py'
    for name in [name for name in sys.modules if '.half_written' in name]:
        del sys.modules[name]


def declare(folder, text):
    folder.write_text(text)


@pytest.mark.parametrize(
    ('text', 'kind'),
    [
        ('FAMILIES = (', 'SyntaxError'),
        ('import no_such_package', 'ModuleNotFoundError'),
        ('FAMILY = 1', 'AttributeError'),
    ],
)
def test_a_broken_declaration_leaves_the_other_families_usable(folder, text, kind, caplog):
    declare(folder, text)
    before = set(listing.family_names())
    assert {'pi05', 'smolvla'} <= before
    listing.find_family('pi05')
    with pytest.raises(ValueError, match="'half_written'"):
        listing.find_family('half_written')
    (record,) = caplog.records
    words = record.getMessage()
    assert 'declarations/half_written.py' in words and kind in words


def test_a_name_that_two_folders_declare_is_refused_with_both(folder):
    declare(folder, 'from vla_runtime.declarations.pi import FAMILIES\n')
    with pytest.raises(ValueError, match='pi05'):
        listing.find_family('pi05')
