"""Parameters of the contract tests: every family, and every entry of its reference cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_contracts import contract_of, contracts
from family_contracts.declaration import Case, FamilyContract
from network_cases import batch_entries, relative_error
from torch import Tensor

from vla_runtime.family.listing import find_family

Entry = tuple[str, Path, int]


@lru_cache(maxsize=4)
def load(entry: Entry) -> Case:
    """The reference case of a test's parameter."""
    family, path, b = entry
    with torch.inference_mode():
        return contract_of(family).case(path, b)


def bound_of(entry: Entry) -> float:
    return contract_of(entry[0]).bound


def entries(*heads: str) -> list[object]:
    """`(family, path, b)` of all cases; of families with these heads, all without one."""
    return [
        pytest.param((family, path, b), id=f'{path.stem}-{b}')
        for family, contract in contracts().items()
        if not heads or find_family(family).head in heads
        for path, b in batch_entries(contract.kind or family)
    ]


def each_entry(*heads: str) -> pytest.MarkDecorator:
    """Run a test with `entry` of every case of families with these heads."""
    return pytest.mark.parametrize('entry', entries(*heads))


def each_family(keep: Callable[[FamilyContract], object] = bool) -> pytest.MarkDecorator:
    """Run a test with `family` of all for which this holds."""
    names = [name for name, contract in contracts().items() if keep(contract)]
    return pytest.mark.parametrize('family', names)


def of_cases(keep: Callable[[FamilyContract], Mapping[str, object] | None]) -> list[object]:
    """`(family, name)` of everything that contracts declare under names."""
    return [
        pytest.param(family, name, id=f'{family}-{name}')
        for family, contract in contracts().items()
        for name in keep(contract) or ()
    ]


def sizes_of(contract: FamilyContract) -> Mapping[str, Any]:
    """Dimensions of the tiny policy and of its variants, by name."""
    return {'tiny': contract.tiny(8), **contract.variants}


def image_tokens_of(case: Case, padding: float = 0.0) -> Tensor:
    """Image tokens of all cameras as an engine holds them, (V, N, W)."""
    found = [case.network.vision(pixels[None])[0] for pixels in case.pixels]
    tokens = torch.full((len(found), max(map(len, found)), found[0].shape[1]), padding)
    for camera, of_image in enumerate(found):
        tokens[camera, : len(of_image)] = of_image
    return tokens


def result_of(
    case: Case,
    past: Mapping[str, Tensor],
    head: Mapping[str, Tensor] | None = None,
    x: Tensor | None = None,
    time: float = 0.5,
) -> Tensor:
    """What the head makes of a prefix: a velocity, actions, or the logits of an answer."""
    network, head = case.network, case.head if head is None else head
    kind = network.family.head
    if kind == 'tokens':
        return network.answer(past)[1]
    if kind == 'single':
        return network.actions(past, **head)
    assert case.noise is not None
    conditioning = network.time_conditioning(torch.tensor([time]))
    return network.velocity(case.noise[None] if x is None else x, past, conditioning, **head)


def seen_by(past: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The mask (R, P) that shows places of a prefix output to the head; None: it has no places."""
    value = past[name]
    masks = {key: mask for key, mask in past.items() if mask.dtype == torch.bool}
    own = [mask for key, mask in masks.items() if key.split('_')[0] == name.split('_')[0]]
    for mask in own or masks.values():
        if value.dtype != torch.bool and value.ndim >= 3 and value.shape[-2] == mask.shape[1]:
            return mask
    return None


def visible(past: Mapping[str, Tensor], name: str) -> Tensor:
    """One row's prefix output at the places that the head sees; all of one without places."""
    value = past[name]
    if value.ndim < 3:
        return value
    mask = seen_by(past, name)
    if mask is None or value.shape[-2] != mask.shape[1]:
        return value
    return value[..., mask[0], :]


def assert_close(found: Tensor, expected: Tensor, bound: float, what: object = '') -> None:
    assert found.shape == expected.shape, what
    assert relative_error(found, expected) <= bound, what
