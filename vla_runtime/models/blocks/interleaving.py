"""Images inside a prompt: sequences of text and image tokens with static places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def interleaved(text: Tensor, images: Tensor, places: Sequence[int]) -> Tensor:
    """Put images (R, V, N, …) into the text (R, L, …), each at its place: (R, V*N + L, …).

    `places` has the text tokens before each image, ascending.
    """
    parts, start = [], 0
    for image, place in enumerate(places):
        if place > start:
            parts.append(text[:, start:place])
        parts.append(images[:, image])
        start = place
    if start < text.shape[1]:
        parts.append(text[:, start:])
    return torch.cat(parts, dim=1)


def images_in_text(
    text: Tensor, token_mask: Tensor, images: Tensor, image_mask: Tensor, places: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Put images (R, V, N, W) into the text (R, L, W), and the masks of both into one.

    Returns embeddings (R, V*N + L, W) and mask (R, V*N + L) bool.
    """
    masks = image_mask[:, :, None].expand(-1, -1, images.shape[2])
    return interleaved(text, images, places), interleaved(token_mask, masks, places)


def separated(x: Tensor, places: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Take text (R, L, …) and image tokens (R, V*N, …), N an image, of (R, P, …) apart again."""
    text, images, start = [], [], 0
    for image, place in enumerate(places):
        first = image * count + place
        if first > start:
            text.append(x[:, start:first])
        images.append(x[:, first : first + count])
        start = first + count
    if start < x.shape[1]:
        text.append(x[:, start:])
    return torch.cat(text, dim=1), torch.cat(images, dim=1)
