"""A Hub id in the place of a folder is answered with the command that downloads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_runtime.files.checkpoint_folders import download_hint


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize('text', ['lerobot/pi05_base', 'https://huggingface.co/lerobot/pi05_base'])
def test_an_id_is_told_from_a_folder(text: str) -> None:
    hint = download_hint(Path(text))
    assert hint.endswith('hf download lerobot/pi05_base --local-dir pi05_base')


@pytest.mark.parametrize('text', ['pick', '/engines/pick', './pick', '../a/b', '~/a', 'a/b/c', ''])
def test_what_is_no_id_gets_no_hint(text: str) -> None:
    assert download_hint(Path(text)) == ''


def test_a_name_in_a_folder_that_is_there_is_no_id() -> None:
    Path('engines').mkdir()
    assert download_hint(Path('engines/pick')) == ''
