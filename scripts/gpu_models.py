"""The networks of the GPU check, in plain torch with random weights: no library, no download.

``unet`` has the structure and the sizes of Stable Diffusion XL's UNet, ``flux`` the blocks and the widths of FLUX.1
with fewer of them. Only structure and sizes matter here: what they compute is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Model:
    """How to make a network and its inputs, for a device and a type."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    return F.scaled_dot_product_attention(split(q), split(k), split(v)).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.out(attend(self.q(x), self.k(context), self.v(context), self.heads))


class CrossBlock(nn.Module):
    """Self-attention, attention to the text, a gated feed-forward."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.text = Attention(width, width, heads), Attention(width, context, heads)
        self.wide, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.own(y, y)
        x = x + self.text(self.norms[1](x), context)
        value, gate = self.wide(self.norms[2](x)).chunk(2, -1)
        return x + self.narrow(value * F.gelu(gate))


class Spatial(nn.Module):
    """Transformer blocks over the pixels of a feature map."""

    def __init__(self, width: int, context: int, heads: int, depth: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, width)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(CrossBlock(width, context, heads) for _ in range(depth))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        y = self.first(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            y = block(y, context)
        return x + self.last(y).transpose(1, 2).unflatten(2, x.shape[2:])


class Residual(nn.Module):
    def __init__(self, width_in: int, width: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, width_in), nn.GroupNorm(groups, width)
        self.conv1, self.conv2 = nn.Conv2d(width_in, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time, width)
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Stage(nn.Module):
    """A residual block and the transformer after it, if it has one."""

    def __init__(self, residual: Residual, spatial: Spatial | None) -> None:
        super().__init__()
        self.residual, self.spatial = residual, spatial

    def forward(self, x: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = self.residual(x, time)
        return x if self.spatial is None else self.spatial(x, context)


class UNet(nn.Module):
    def __init__(
        self, widths: tuple[int, ...], depths: tuple[int, ...], context: int, head: int, groups: int, time: int
    ) -> None:
        super().__init__()

        def stage(width_in: int, width: int, depth: int) -> Stage:
            spatial = Spatial(width, context, width // head, depth, groups) if depth else None
            return Stage(Residual(width_in, width, time, groups), spatial)

        self.time_in, self.time_out = nn.Linear(widths[0], time), nn.Linear(time, time)
        self.first = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        sizes, width = [widths[0]], widths[0]
        for level, (wide, depth) in enumerate(zip(widths, depths, strict=True)):
            self.down.append(nn.ModuleList([stage(width if i == 0 else wide, wide, depth) for i in range(2)]))
            last = level == len(widths) - 1
            self.shrink.append(nn.Identity() if last else nn.Conv2d(wide, wide, 3, stride=2, padding=1))
            sizes += [wide, wide] + ([] if last else [wide])
            width = wide
        self.middle = stage(width, width, depths[-1])
        self.end = Residual(width, width, time, groups)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, (wide, depth) in enumerate(zip(reversed(widths), reversed(depths), strict=True)):
            stages = []
            for _ in range(3):
                stages.append(stage(width + sizes.pop(), wide, depth))
                width = wide
            self.up.append(nn.ModuleList(stages))
            self.grow.append(nn.Identity() if level == len(widths) - 1 else nn.Conv2d(wide, wide, 3, padding=1))
        self.norm, self.last = nn.GroupNorm(groups, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, sample: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        time = self.time_out(F.silu(self.time_in(time)))
        x = self.first(sample)
        kept = [x]
        for stages, shrink in zip(self.down, self.shrink, strict=True):
            for stage in stages:
                x = stage(x, time, context)
                kept.append(x)
            if not isinstance(shrink, nn.Identity):
                x = shrink(x)
                kept.append(x)
        x = self.end(self.middle(x, time, context), time)
        for stages, grow in zip(self.up, self.grow, strict=True):
            for stage in stages:
                x = stage(torch.cat([x, kept.pop()], 1), time, context)
            if not isinstance(grow, nn.Identity):
                x = grow(F.interpolate(x, scale_factor=2.0))
        return self.last(F.silu(self.norm(x)))


class Double(nn.Module):
    """Image and text with weights of their own and one attention over both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.shift = nn.ModuleList(nn.Linear(width, 6 * width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, condition: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [text, image]
        mods = [shift(F.silu(condition))[:, None].chunk(6, -1) for shift in self.shift]
        qkv = [self.qkv[i](self.norm(parts[i]) * (1 + mods[i][1]) + mods[i][0]).chunk(3, -1) for i in range(2)]
        joined = [torch.cat([qkv[0][j], qkv[1][j]], 1) for j in range(3)]
        mixed = attend(joined[0], joined[1], joined[2], self.heads)
        split = mixed[:, : text.shape[1]], mixed[:, text.shape[1] :]
        done = []
        for i in range(2):
            x = parts[i] + mods[i][2] * self.out[i](split[i])
            y = self.norm(x) * (1 + mods[i][4]) + mods[i][3]
            done.append(x + mods[i][5] * self.narrow[i](F.gelu(self.wide[i](y), approximate="tanh")))
        return done[1], done[0]


class Single(nn.Module):
    """Attention and feed-forward side by side."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.shift, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width, elementwise_affine=False)
        self.first, self.last = nn.Linear(width, 7 * width), nn.Linear(5 * width, width)
        self.sizes = [3 * width, 4 * width]

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.shift(F.silu(condition))[:, None].chunk(3, -1)
        qkv, wide = self.first(self.norm(x) * (1 + scale) + shift).split(self.sizes, -1)
        q, k, v = qkv.chunk(3, -1)
        mixed = attend(q, k, v, self.heads)
        return x + gate * self.last(torch.cat([mixed, F.gelu(wide, approximate="tanh")], -1))


class Flux(nn.Module):
    def __init__(self, width: int, heads: int, doubles: int, singles: int, channels: int, text: int) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(channels, width), nn.Linear(text, width)
        self.doubles = nn.ModuleList(Double(width, heads) for _ in range(doubles))
        self.singles = nn.ModuleList(Single(width, heads) for _ in range(singles))
        self.last = nn.Linear(width, channels)

    def forward(self, image: torch.Tensor, text: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x, y = self.image(image), self.text(text)
        for double in self.doubles:
            x, y = double(x, y, condition)
        x = torch.cat([y, x], 1)
        for single in self.singles:
            x = single(x, condition)
        return self.last(x[:, y.shape[1] :])


def models(device: torch.device, dtype: torch.dtype, tiny: bool) -> dict[str, Model]:
    """The networks by name."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def made(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            torch.manual_seed(0)
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                with torch.device(device):
                    return make().eval().requires_grad_(False)
            finally:
                torch.set_default_dtype(before)

        return build

    if tiny:
        return {
            "unet": Model(
                make=made(lambda: UNet((8, 16), (0, 1), context=12, head=8, groups=2, time=16)),
                inputs=lambda: (drawn(2, 4, 8, 8), drawn(2, 8), drawn(2, 5, 12)),
            ),
            "flux": Model(
                make=made(lambda: Flux(32, 4, doubles=2, singles=2, channels=8, text=12)),
                inputs=lambda: (drawn(1, 16, 8), drawn(1, 6, 12), drawn(1, 32)),
            ),
        }
    return {
        "unet": Model(
            make=made(lambda: UNet((320, 640, 1280), (0, 2, 10), context=2048, head=64, groups=32, time=1280)),
            inputs=lambda: (drawn(2, 4, 128, 128), drawn(2, 320), drawn(2, 77, 2048)),
        ),
        "flux": Model(
            make=made(lambda: Flux(3072, 24, doubles=8, singles=16, channels=64, text=4096)),
            inputs=lambda: (drawn(1, 4096, 64), drawn(1, 512, 4096), drawn(1, 3072)),
        ),
    }
