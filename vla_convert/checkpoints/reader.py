"""Interface of a family's checkpoint reader, and the search for the reader of a folder.

A file of `vla_convert/readers` has a `READER`. `lerobot_folder` reads LeRobot folders with the
reader's description of the policy type; the reader itself reads folders of other projects.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from vla_convert.checkpoints.folder_facts import ExportError, FolderFacts
from vla_convert.checkpoints.lerobot_folder import (
    LeRobotPolicy,
    described_policy,
    is_lerobot_folder,
    policy_type,
)
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.tensor_names import TensorNames
from vla_convert.checkpoints.tensors import prefixes, read_tensors
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.family.declaration import PolicyDims
from vla_runtime.family.listing import family_folders

# (cameras, prompt_length, horizon) to dimensions; prompt_length is 0 without language.
MakeDims = Callable[[int, int, int], PolicyDims]

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
    facts: FolderFacts
    options: ExportOptions
    missing: MissingFacts


class CheckpointReader:
    """Reads the checkpoints of one family folder.

    Attributes:
        lerobot: policy types that `lerobot_folder` reads for it.
        lerobot_types: LeRobot types with processors of their own, whose folders it reads
            itself.
        beside_adapter: what such a project's adapter needs beside it, for messages.
        wanted: option to the family's own sentence that asks for it.
        marks: tokens that identify the language model's vocabulary among those that fit its
            text table.
        known: patterns of config fields that play no part at inference or that tensors show.
    """

    names: ClassVar[TensorNames]
    lerobot: ClassVar[tuple[LeRobotPolicy, ...]] = ()
    lerobot_types: ClassVar[tuple[str, ...]] = ()
    projects: ClassVar[tuple[str, ...]] = ()
    beside_adapter: ClassVar[str] = ''
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

    def read_folder(self, folder: Path, family: str, options: ExportOptions) -> FolderFacts:
        """Read the facts of a recognised folder, or of a LeRobot folder of `lerobot_types`."""
        raise NotImplementedError

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Choose the tensors, or parts of tensors, that the bundle holds; by default all.

        Raises CheckpointError: the folder asks for a part that is not there.
        """
        embodiment = source.options.embodiment
        if embodiment is not None:
            source.missing.conflict(
                f'--embodiment says {embodiment} but the policy is of one robot'
            )
        return dict(source.tensors)

    def sizes(self, source: Source) -> MakeDims | None:
        """Return a maker of the dimensions that the tensors show; None once one is missing.

        Raises CheckpointError: tensors that are missing or contradict each other; `MakeDims` too.
        """
        raise NotImplementedError

    def files(self, source: Source) -> dict[str, Path]:
        """Files that the bundle holds beside those of every family (`Family.files`), by name."""
        return {}


def find_reader(
    folder: Path, weights: Path | None = None
) -> tuple[CheckpointReader, LeRobotPolicy | None]:
    """Find the reader of a folder and the policy's description, if `lerobot_folder` reads it.

    `weights`: folder of the weights below an adapter. Raises ExportError: unsupported, or no
    checkpoint.
    """
    readers = _readers()
    refuse_unserved(folder)
    if is_lerobot_folder(folder):
        described = [(policy, reader) for reader in readers for policy in reader.lerobot]
        own = {name: reader for reader in readers for name in reader.lerobot_types}
        types = dict.fromkeys([policy.type for policy, _ in described] + list(own))
        found = policy_type(folder, list(types), [policy for policy, _ in described])
        if found in own:
            return own[found], None
        of_type = [policy for policy, _ in described if policy.type == found]
        chosen = described_policy(folder, of_type)
        return next(reader for policy, reader in described if policy is chosen), chosen
    stored = read_tensors(weights or folder)
    for prefix in prefixes(stored):
        names = [name.removeprefix(prefix) for name in stored]
        for reader in readers:
            if reader.recognises(names):
                return reader, None
    projects = [project for reader in readers for project in reader.projects]
    raise ExportError(
        f'{folder}: neither its config.json nor its tensors are those of a policy that is served: '
        f'LeRobot folders name their policy type, and {", ".join(projects)} are known by their '
        'tensors'
    )


def refuse_unserved(folder: Path) -> None:
    """Refuse a folder that looks like one of a family and is not served (ExportError)."""
    for reader in _readers():
        reader.refuse_unserved(folder)


def beside_adapters() -> list[str]:
    """What adapters of the projects need beside them, for messages."""
    return [reader.beside_adapter for reader in _readers() if reader.beside_adapter]


def _readers() -> list[CheckpointReader]:
    return [
        importlib.import_module(f'vla_convert.readers.{folder}').READER
        for folder in family_folders()
    ]
