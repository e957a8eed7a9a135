"""Objectives of a tabletop policy's three training stages, the same for every family.

1. `SeeObjective`: the vision network finds patch and offset of each colour.
2. `GroundObjective`: the prefix points at the *named* block; its last token gives the position, the
   state and the arm at the chunk's end.
3. The expert's chunks plus the second loss: `FlowObjective`, `DiffusionObjective`, `ChunkObjective`
   (one pass) or `TokenObjective`, by kind of head.

Flow matching alone stayed at chance about the meant block; so did the second stage without
pointing (1200 steps), which is learned within 200. These heads are dropped after training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.family.declaration import Family, PolicyDims, scheduler_of
from vla_runtime.family.noise_schedule import NoiseScheduler
from vla_runtime.models.base.flow_network import FlowNetwork, SinglePassNetwork
from vla_runtime.models.base.token_network import TokenNetwork
from vla_runtime.models.blocks.attention import attend
from vla_runtime.models.shapes.traced_shapes import repeat_prefix
from vla_tabletop.training.recipes.recipe import Prefix
from vla_tabletop.training.samples import PATCH_SIZE
from vla_tabletop.training.vocabulary import Answers
from vla_tabletop.training.world import IMAGE_SIZE, TrainingWorld

GROUND_WEIGHT = 0.2
# Network and images (n, 3, S, S) to image tokens (n, N, W).
See = Callable[[Any, Tensor], Tensor]


class SeeObjective(nn.Module):
    """First stage: find the patch of each thing's centre, and its offset from the middle."""

    def __init__(self, width: int, world: TrainingWorld, see: See | None = None) -> None:
        super().__init__()
        self._half_height_px = world.half_height_px
        self.head = nn.Linear(width, world.points * 3)
        self._see = see

    def forward(
        self, network: FlowNetwork, pixels: Tensor, pixel: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures to report.

        `pixels` (B, V, 3, S, S); `pixel` (B, V, C, 2) centres as `project` gives them, NaN behind
        the camera.
        """
        images = pixels.flatten(0, 1)
        tokens = network.vision(images) if self._see is None else self._see(network, images)
        out = self.head(tokens).unflatten(-1, (-1, 3))  # (n, N, C, 3)
        patch, offset, seen = locate(pixel.flatten(0, 1), self._half_height_px)
        patch = patch[seen]
        logits = out[..., 0].transpose(1, 2)[seen]  # (seen, N)
        offsets = out[..., 1:].transpose(1, 2)[seen]  # (seen, N, 2)
        chosen = offsets[torch.arange(len(patch)), patch]
        wanted = offset[seen]
        loss = F.cross_entropy(logits, patch) + 4.0 * F.l1_loss(chosen, wanted)
        hits = (logits.argmax(-1) == patch).float().mean()
        error_px = (chosen - wanted).norm(dim=-1).mean() * PATCH_SIZE
        return loss, {'patch_accuracy': hits, 'offset_px': error_px}


class GroundObjective(nn.Module):
    """The named thing, in the images and in the room; the state; the chunk's end."""

    def __init__(self, image_width: int, width: int, world: TrainingWorld, action_dim: int) -> None:
        super().__init__()
        self._half_height_px = world.half_height_px
        self.point = nn.Linear(image_width, 1)
        self.place = _head(width, world.place)
        self.state = _head(width, len(world.state))
        self.end = _head(width, action_dim)

    def forward(
        self,
        prefix: Prefix,
        pixel: Tensor,
        place: Tensor,
        state: Tensor,
        end: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures to report.

        `pixel` (B, V, 2): the named thing's centre as `project` gives it; `place` (B, P): its
        position, dm; `state` (B, S) and `end` (B, A, the chunk's last action): normalised.
        """
        patch, _, seen = locate(pixel.flatten(0, 1), self._half_height_px)
        last = prefix.last
        pointed = self.point(prefix.images).flatten(0, 1).squeeze(-1)[seen]
        point_loss = F.cross_entropy(pointed, patch[seen])
        found = self.place(last)
        place_loss = F.smooth_l1_loss(found, place, beta=0.1)
        state_loss = F.smooth_l1_loss(self.state(last), state.clamp(-1.1, 1.1), beta=0.1)
        end_loss = F.smooth_l1_loss(self.end(last), end, beta=0.1)
        error_cm = (found - place).norm(dim=-1).mean() * 10.0
        return point_loss + place_loss + state_loss + end_loss, {
            'pointed': (pointed.argmax(-1) == patch[seen]).float().mean(),
            'place_cm': error_cm,
            'state': state_loss,
            'end': end_loss,
        }


class FlowObjective(nn.Module):
    """Flow matching (arXiv 2410.24164); several draws of noise and time share one prefix.

    t is 1 at the noise and 0 at the actions, and the velocity leads to the noise, as in openpi and
    LeRobot. `step_weight`: (H,) of each step's squared error, of mean 1.
    """

    step_weight: Tensor

    def __init__(self, draws: int, step_weight: Tensor) -> None:
        super().__init__()
        self.draws = draws
        self.register_buffer('step_weight', step_weight[:, None], persistent=False)

    def forward(
        self,
        network: FlowNetwork,
        prefix: Prefix,
        actions: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Weighted mean squared error of the velocity of (B, H, A) normalised actions."""
        draws = self.draws
        actions = actions.repeat_interleave(draws, dim=0)
        noise = torch.randn(actions.shape, generator=generator).to(actions)
        # Beta(1.5, 1) by its inverse distribution, leaning to the noisy end; never quite 0.
        uniform = torch.rand(len(actions), generator=generator)
        times = (uniform ** (1 / 1.5) * 0.999 + 0.001).to(actions)
        t = times[:, None, None]
        past = repeat_prefix(network, prefix.past, draws)
        velocity = network.velocity(
            t * noise + (1 - t) * actions, past, network.time_conditioning(times)
        )
        return (self.step_weight * (velocity - (noise - actions)).square()).mean()


class DiffusionObjective(nn.Module):
    """Loss of a scheduler's prediction (arXiv 2006.11239), at training steps drawn evenly.

    `draws`: (noise, step) pairs a prefix; `step_weight`: (H,) of each step's squared error, of
    mean 1.
    """

    step_weight: Tensor
    kept: Tensor

    def __init__(self, draws: int, step_weight: Tensor, scheduler: NoiseScheduler) -> None:
        super().__init__()
        self.draws = draws
        self.prediction = scheduler.prediction
        self.register_buffer('step_weight', step_weight[:, None], persistent=False)
        kept = torch.from_numpy(scheduler.kept_table())
        self.register_buffer('kept', kept, persistent=False)

    def forward(
        self,
        network: FlowNetwork,
        prefix: Prefix,
        actions: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Weighted mean squared error of the prediction, of (B, H, A) normalised actions."""
        actions = actions.repeat_interleave(self.draws, dim=0)
        noise = torch.randn(actions.shape, generator=generator).to(actions)
        steps = torch.randint(len(self.kept), (len(actions),), generator=generator).to(
            actions.device
        )
        kept = self.kept[steps][:, None, None]
        signal, spread = kept.sqrt(), (1 - kept).sqrt()
        targets = {
            'epsilon': noise,
            'sample': actions,
            'v_prediction': signal * noise - spread * actions,
        }
        predicted = network.velocity(
            signal * actions + spread * noise,
            repeat_prefix(network, prefix.past, self.draws),
            network.time_conditioning(steps.to(actions)),
        )
        return (self.step_weight * (predicted - targets[self.prediction]).square()).mean()


class ChunkObjective(nn.Module):
    """L1 of a chunk made in one pass (arXiv 2304.13705, without the variational encoder).

    `step_weight`: (H,) of each step's error, of mean 1.
    """

    step_weight: Tensor

    def __init__(self, step_weight: Tensor) -> None:
        super().__init__()
        self.register_buffer('step_weight', step_weight[:, None], persistent=False)

    def forward(
        self,
        network: SinglePassNetwork,
        prefix: Prefix,
        actions: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Weighted mean absolute error of (B, H, A) normalised actions; nothing is drawn."""
        return (self.step_weight * (network.actions(prefix.past) - actions).abs()).mean()


class TokenObjective(nn.Module):
    """Cross entropy of the answers that stand for chunks, each token after the right ones."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def forward(
        self,
        network: TokenNetwork,
        prefix: Prefix,
        actions: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Mean over all tokens of (B, H, A) normalised actions; nothing is drawn."""
        tokens, written = (
            torch.from_numpy(one).to(actions.device)
            for one in self._answers.write(actions.cpu().numpy())
        )
        logits = answer_logits(network, prefix.past, tokens[:, :-1])
        return F.cross_entropy(logits[written], tokens[written])


def answer_logits(network: TokenNetwork, past: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits (B, n + 1, vocabulary) after each of `tokens` (B, n) int64, in one pass.

    `past`: outputs of `prefix`, B rows.
    """
    mask, count = past['prefix_mask'], tokens.shape[1]
    places = torch.arange(count, device=tokens.device)
    rotation = network.rotary(network.answer_position(mask)[:, None] + places)
    before = (places <= places[:, None])[None].expand(len(tokens), -1, -1)
    seen = torch.cat([mask[:, None].expand(-1, count, -1), before], dim=2)
    x = network.language.embed(tokens)
    for layer, block in enumerate(network.language.layers):
        q, k, v = block.project(x, rotation)
        keys = torch.cat([past['prefix_key'][layer], k], dim=2)
        values = torch.cat([past['prefix_value'][layer], v], dim=2)
        x = block.combine(x, attend(q, keys, values, seen))
    return torch.cat([past['logits'][:, None], network.token_logits(x)], dim=1)


def chunk_objective(
    family: Family,
    dims: PolicyDims,
    draws: int,
    step_weight: Tensor,
    answers: Answers | None = None,
) -> nn.Module:
    """Return the third stage's objective for a kind of head; `answers` are for `tokens`."""
    if answers is not None:
        return TokenObjective(answers)
    if family.head == 'flow':
        return FlowObjective(draws, step_weight)
    if family.has_scheduler:
        scheduler = scheduler_of(dims)
        assert isinstance(scheduler, NoiseScheduler), 'no recipe trains another head'
        return DiffusionObjective(draws, step_weight, scheduler)
    return ChunkObjective(step_weight)


def locate(pixel: Tensor, half_height_px: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a point's patch (...) int, offset (..., 2) in patches, and seen (...) bool.

    The offset is from the patch's middle. `pixel` (..., 2) is as `project` gives it, in units of
    `half_height_px`. Seen is False behind the camera and in the square's black bars.
    """
    place = IMAGE_SIZE / 2 + half_height_px * pixel
    across = (place[..., 0] >= 0) & (place[..., 0] < IMAGE_SIZE)
    bar = IMAGE_SIZE / 2 - half_height_px
    down = (place[..., 1] >= bar) & (place[..., 1] < IMAGE_SIZE - bar)
    cell = place.nan_to_num() / PATCH_SIZE
    side = IMAGE_SIZE // PATCH_SIZE
    column, row = cell.long().clamp(0, side - 1).unbind(-1)
    return row * side + column, cell - cell.floor() - 0.5, across & down


def _head(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, out))
