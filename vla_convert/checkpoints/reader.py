"""Interface of a family's checkpoint reader, and the search for the reader of a folder.

A file of `vla_convert/readers` has a `READER`. `lerobot_folder` fills the draft from a LeRobot
folder with the reader's description of the policy type; the reader adds what only its folders say,
and reads folders of other projects.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn

from vla_convert.checkpoints.dims import Given, Heads, MakeDims, read_dims
from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.lerobot_folder import (
    LeRobotPolicy,
    is_lerobot_folder,
    read_lerobot_folder,
)
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.tensor_names import TensorNames
from vla_convert.checkpoints.tensors import prefixes, read_tensors
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.family.listing import family_files
from vla_runtime.files.json_file import JsonMapping

# `wanted` of policies whose language model is one of the Hugging Face Hub's.
VLM_TOKENIZER: Mapping[str, str] = {
    '--tokenizer': (
        'tokenizer.json of the model that config.json names as vlm_model_name, from the '
        'Hugging Face Hub'
    ),
}


class Source(NamedTuple):
    """A checkpoint on its way into a bundle; tensors by our names, for `sizes` those selected."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    facts: Draft
    options: ExportOptions
    missing: MissingFacts


class CheckpointReader:
    """Reads the checkpoints of one family folder.

    Attributes:
        names: tensor names of the checkpoints, and ours.
        lerobot: its policy types among LeRobot's.
        projects: other projects whose folders `recognises` knows, for messages.
        beside_adapter: what such a project's adapter needs beside it, for messages.
        heads: published head counts, by the fields of the dimensions that hold them.
        wanted: option to the family's own sentence that asks for it.
        marks: tokens that identify the language model's vocabulary among those that fit its
            text table.
        known: patterns of config fields that play no part at inference or that tensors show;
            those of all LeRobot folders (`LEROBOT_KEYS`) are known anyway.
    """

    names: ClassVar[TensorNames]
    lerobot: ClassVar[tuple[LeRobotPolicy, ...]] = ()
    projects: ClassVar[tuple[str, ...]] = ()
    beside_adapter: ClassVar[str] = ''
    heads: ClassVar[Mapping[str, Heads]] = {}
    wanted: ClassVar[Mapping[str, str]] = {}
    marks: ClassVar[tuple[str, ...]] = ()
    known: ClassVar[tuple[str, ...]] = ()

    def recognises(self, names: Collection[str]) -> bool:
        """Return whether tensors of these names are the family's; not asked for LeRobot folders."""
        return False

    def refuse_unserved(self, folder: Path) -> None:
        """Refuse a folder that looks like the family's and is not served.

        Raises ExportError: says what the folder is, and what is supported.
        """

    def family(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> str | None:
        """The family that folder and tensors (our names) show; None: config.json's facts decide.

        Raises CheckpointError: the tensors are of none of the reader's families.
        """
        return None

    def policy(self, config: JsonMapping) -> LeRobotPolicy | None:
        """Describe the policy of a LeRobot config.json; None: it is none of this reader's.

        Raises JsonError: the config.json is of this reader, and of a policy that is not served.
        """
        found = config.get('type', str, None)
        return next((policy for policy in self.lerobot if policy.type == found), None)

    def read(self, draft: Draft) -> None:
        """Fill the draft from its folder; by default as that of a LeRobot policy.

        Raises ExportError, JsonError: damaged or contradictory files, or unsupported settings.
        """
        policy = self.policy(draft.config)
        assert policy is not None, 'a reader of other folders reads them itself'
        read_lerobot_folder(draft, policy)

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Choose the tensors, or parts of tensors, that the bundle holds; by default all.

        Raises CheckpointError: the folder asks for a part that is not there.
        """
        return dict(source.tensors)

    def sizes(self, source: Source) -> MakeDims | None:
        """Return a maker of the dimensions that the tensors show; None once one is missing.

        Raises CheckpointError: tensors that are missing or contradict each other; `MakeDims` too.
        """
        return self.dims(source, {})

    def dims(
        self,
        source: Source,
        given: Given,
        *,
        heads: Mapping[str, Heads] | None = None,
        config: JsonMapping | None = None,
    ) -> MakeDims | None:
        """Read the dimensions off the tensors, with those that they do not show (`read_dims`)."""
        return read_dims(
            source.tensors,
            source.facts,
            source.options,
            source.missing,
            heads=self.heads if heads is None else heads,
            given=given,
            config=config,
        )

    def files(self, source: Source) -> dict[str, Path]:
        """Files that the bundle holds beside those of every family (`Family.files`), by name."""
        return {}


def find_reader(folder: Path, weights: Path | None = None) -> CheckpointReader:
    """Find the reader of a folder.

    `weights`: folder of the weights below an adapter. Raises ExportError: unsupported, or no
    checkpoint.
    """
    readers = _readers()
    refuse_unserved(folder)
    if is_lerobot_folder(folder):
        config = read_config(folder)
        found = config.get('type', str, None)
        for reader in readers:
            # A config.json of 2024 names no type, and its fields show what it is of.
            named = found is None or any(policy.type == found for policy in reader.lerobot)
            if named and reader.policy(config) is not None:
                return reader
        _refuse_type(config, readers)
    stored = read_tensors(weights or folder)
    for prefix in prefixes(stored):
        names = [name.removeprefix(prefix) for name in stored]
        for reader in readers:
            if reader.recognises(names):
                return reader
    projects = [project for reader in readers for project in reader.projects]
    raise ExportError(
        f'{folder}: neither its config.json nor its tensors are those of a policy that is served: '
        f'LeRobot folders name their policy type, and {", ".join(projects)} are known by their '
        'tensors'
    )


def _refuse_type(config: JsonMapping, readers: Sequence[CheckpointReader]) -> NoReturn:
    """Refuse a policy type that no reader has (JsonError)."""
    known = dict.fromkeys(f"'{policy.type}'" for one in readers for policy in one.lerobot)
    *others, last = known
    served = f'{", ".join(others)} and {last}'
    found = config.get('type', str, None)
    if found is None:
        raise config.error(
            'type',
            'is missing, which says what kind of policy it is; copy config.json again, or add it '
            f'(train_config.json beside it has it as policy.type). Served are {served}',
        )
    raise config.error('type', f"policies of type '{found}' are not served, only {served}")


def refuse_unserved(folder: Path) -> None:
    """Refuse a folder that looks like one of a family and is not served (ExportError)."""
    for reader in _readers():
        reader.refuse_unserved(folder)


def beside_adapters() -> list[str]:
    """What adapters of the projects need beside them, for messages."""
    return [reader.beside_adapter for reader in _readers() if reader.beside_adapter]


def _readers() -> list[CheckpointReader]:
    return [
        importlib.import_module(f'vla_convert.readers.{file}').READER for file in family_files()
    ]
