"""BitVLA (arXiv 2506.07530): SigLIP, BitNet b1.58 and an action head, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.bitvla import BitVlaDims
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.models.base.parallel_network import ParallelNetwork
from vla_runtime.models.blocks.attention import Rotary, SplitHeads, attend, rotate
from vla_runtime.models.blocks.interleaving import images_in_text
from vla_runtime.models.blocks.layers import RmsNorm, gelu_tanh
from vla_runtime.models.blocks.siglip import PatchEmbedding, vision_block
from vla_runtime.models.blocks.ternary import TernaryLinear, TernaryQuery, apply_together
from vla_runtime.models.blocks.transformer import Mlp

# --------------------------------------------------------------------------------------------------
# BitVLA's vision tower: SigLIP, in ternary weights or not, and its projector.


class TernaryVisionAttention(nn.Module):
    """Full self-attention over the patches of one image."""

    def __init__(self, dims: VisionDims) -> None:
        super().__init__()
        width = dims.width
        self.num_heads = dims.num_heads
        self.q = TernaryQuery(width, width, width // dims.num_heads)
        self.k = TernaryLinear(width, width)
        self.v = TernaryLinear(width, width)
        self.out = TernaryLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = (
            projected.view(n, tokens, self.num_heads, -1).transpose(1, 2)
            for projected in apply_together((self.q, self.k, self.v), x)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(n, tokens, width))


class TernaryVisionMlp(nn.Module):
    def __init__(self, dims: VisionDims) -> None:
        super().__init__()
        self.fc1 = TernaryLinear(dims.width, dims.mlp_dim)
        self.fc2 = TernaryLinear(dims.mlp_dim, dims.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu_tanh(self.fc1(x)))


class TernaryVisionBlock(nn.Module):
    """Pre-norm transformer block; norms and residual stream are float32."""

    def __init__(self, dims: VisionDims) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dims.width, eps=1e-6)
        self.attention = TernaryVisionAttention(dims)
        self.norm2 = nn.LayerNorm(dims.width, eps=1e-6)
        self.mlp = TernaryVisionMlp(dims)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class BitVlaVision(nn.Module):
    """Pixels to image tokens, by the tower's last block but one without the final norm."""

    def __init__(self, dims: BitVlaDims) -> None:
        super().__init__()
        vision = dims.vision
        self.patch_embedding = PatchEmbedding(vision)
        self.position_embedding = nn.Parameter(torch.empty(vision.tokens, vision.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        block = TernaryVisionBlock if dims.ternary_vision else vision_block
        self.blocks = nn.ModuleList(block(vision) for _ in range(vision.depth))
        self.projector = Mlp(vision.width, dims.language.width, F.gelu, dims.language.width)

    def features(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) float32 in [-1, 1] to (n, N, width of the tower) float32."""
        x = self.patch_embedding(pixels) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images (n, 3, S, S) float32 in [-1, 1] to (n, N, language width) float32."""
        return self.projector(self.features(pixels)).float()


# --------------------------------------------------------------------------------------------------


class TernaryAttention(SplitHeads):
    """Grouped-query attention whose joined heads pass a norm before the last projection."""

    def __init__(self, dims: DecoderDims, epsilon: float) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        queries, keys = (count * dims.head_dim for count in (dims.num_heads, dims.num_kv_heads))
        self.q = TernaryQuery(dims.width, queries, dims.head_dim, bias=False)
        self.k = TernaryLinear(dims.width, keys, bias=False)
        self.v = TernaryLinear(dims.width, keys, bias=False)
        self.norm = RmsNorm(queries, epsilon)
        self.out = TernaryLinear(queries, dims.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, seen: Tensor) -> Tensor:
        """(R, P, W) to the same; `seen` is (R, 1, P) bool."""
        q, k, v = (self.heads(part) for part in apply_together((self.q, self.k, self.v), x))
        return self.out(self.norm(attend(rotate(q, rotary), rotate(k, rotary), v, seen)))


class TernaryMlp(nn.Module):
    """An MLP gated by a squared ReLU, its hidden numbers normalised."""

    def __init__(self, dims: DecoderDims, epsilon: float) -> None:
        super().__init__()
        self.gate = TernaryLinear(dims.width, dims.mlp_dim, bias=False)
        self.up = TernaryLinear(dims.width, dims.mlp_dim, bias=False)
        self.norm = RmsNorm(dims.mlp_dim, epsilon)
        self.down = TernaryLinear(dims.mlp_dim, dims.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = apply_together((self.gate, self.up), x)
        return self.down(self.norm(F.relu(gate).square() * up))


class BitNetBlock(nn.Module):
    """One block of BitNet b1.58; the residual stream is float32."""

    def __init__(self, dims: DecoderDims, epsilon: float) -> None:
        super().__init__()
        self.input_norm = RmsNorm(dims.width, epsilon)
        self.attention = TernaryAttention(dims, epsilon)
        self.post_norm = RmsNorm(dims.width, epsilon)
        self.mlp = TernaryMlp(dims, epsilon)

    def forward(self, x: Tensor, seen: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.input_norm(x), rotary, seen)
        return x + self.mlp(self.post_norm(x))


class BitNet(nn.Module):
    """A stack of blocks with its text table and its final norm."""

    def __init__(self, dims: DecoderDims, epsilon: float, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dims.width)
        self.blocks = nn.ModuleList(BitNetBlock(dims, epsilon) for _ in range(dims.depth))
        self.norm = RmsNorm(dims.width, epsilon)

    def embed(self, tokens: Tensor) -> Tensor:
        """(R, L) token ids to (R, L, W) float32."""
        return self.embedding(tokens).float()


class BitVla(ParallelNetwork):
    """SigLIP, BitNet, action head; shapes as of `ParallelNetwork`."""

    dims: BitVlaDims
    vision: BitVlaVision

    def __init__(self, dims: BitVlaDims) -> None:
        language = BitNet(dims.language, dims.rms_epsilon, dims.vocabulary)
        super().__init__(dims, BitVlaVision(dims), language)

    def embed_prompt(
        self, text: Tensor, token_mask: Tensor, images: Tensor, seen: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `ParallelNetwork.embed_prompt`; the state's token stands in place of a text token."""
        place = self.dims.state_place
        text = torch.cat([text[:, :place], state[:, None], text[:, place + 1 :]], dim=1)
        return images_in_text(text, token_mask, images, seen, self.dims.image_places)


NETWORKS = {'bitvla': BitVla}
