"""Front-ends of image and audio encoders: patches of an image, frames of a spectrogram.

Letters: B batch, C channels, H height, W width, D width of a vector, N positions, F frames.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preblock.models.modules.initialisers import DEFAULT_STD, Initialiser, initialise_
from preblock.models.modules.signature import StemSignature
from preblock.models.serialization import Count, Flag, Positive, check_fields


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """The sizes of a stem of images.

    Args:
        family: its row of the family table, or another name.
        width: D.
        channels: C of an image.
        image_size: native height and width of images, in pixels.
        patch_size: height and width of a patch; pixels of `image_size` beyond whole patches are ignored.
        bias: whether the convolution has a bias; default True.
        norm_eps: epsilon of a LayerNorm at the end; default None, no norm.

    """

    kind: ClassVar[str] = "patches"
    family: str
    width: Count
    channels: Count
    image_size: Count
    patch_size: Count
    bias: Flag = True
    norm_eps: Positive | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless the sizes are possible."""
        check_fields(self)
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size: got {self.patch_size}, expected 1 to {self.image_size}, the image_size")

    @property
    def side(self) -> int:
        """Rows and columns of the native grid of patches."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """The sizes of a stem of spectrograms.

    Args:
        family: its row of the family table, or another name.
        width: D.
        channels: C, mel bins of a frame.
        positions: N, vectors of a spectrogram of 2 N frames.

    """

    kind: ClassVar[str] = "audio"
    family: str
    width: Count
    channels: Count
    positions: Count

    def __post_init__(self) -> None:
        """Raise ValueError unless the sizes are possible."""
        check_fields(self)


StemConfig = PatchConfig | AudioConfig


class PatchStem(nn.Module):
    """An image as a row of vectors: a class token, then one for each patch (Dosovitskiy et al. 2020), plus positions.

    The table of positions is learned for one grid of patches. For another grid it is interpolated: bicubic, the
    corners not aligned, the row of the class token kept. A LayerNorm may follow (Radford et al. 2021).

    Args:
        config: the sizes.
        init: initial values of the class token and of the positions, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: `init` is not known, or `std` is not above 0.

    """

    def __init__(self, config: PatchConfig, init: Initialiser = "normal", std: float = DEFAULT_STD) -> None:
        super().__init__()
        self.config = config
        self.class_token = nn.Parameter(torch.empty(config.width))
        self.patches = nn.Conv2d(
            config.channels, config.width, config.patch_size, stride=config.patch_size, bias=config.bias
        )
        self.positions = nn.Parameter(torch.empty(1 + config.side**2, config.width))
        self.norm = None if config.norm_eps is None else nn.LayerNorm(config.width, eps=config.norm_eps)
        initialise_(self.class_token.data.unsqueeze(0), init, std)
        initialise_(self.positions, init, std)

    @property
    def signature(self) -> StemSignature:
        """The input, sizes and promises of its graph."""
        config = self.config
        return StemSignature(
            family=config.family,
            width=config.width,
            input="pixel_values",
            shape=("batch", config.channels, "height", "width"),
            rows=1 + config.side**2,
            image_size=config.image_size,
            patch_size=config.patch_size,
            terms=config.channels * config.patch_size**2,
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the vectors (B, 1 + H // patch_size * W // patch_size, D) entering block 0.

        Args:
            pixel_values: float (B, C, H, W): of the native size, or H and W multiples of the patch size.

        Raises:
            ValueError: the channels or the size are others.

        """
        if not torch.compiler.is_exporting():
            self.signature.check(pixel_values.shape)
        grid = self.patches(pixel_values)
        patches = grid.flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(patches.shape[0], 1, -1), patches), dim=1) + self._table(*grid.shape[2:])
        return x if self.norm is None else self.norm(x)

    def _table(self, height: int, width: int) -> Tensor:
        """Return the positions (1 + height * width, D) of a grid of patches."""
        side = self.config.side
        table = self.positions[1:].reshape(side, side, -1)
        if torch.compiler.is_exporting():
            # onnxruntime's resizing takes many times as long as two products. They do not change the native table.
            repeated = torch.tensor([0, 0, *range(side), side - 1, side - 1], device=table.device)
            table = table.index_select(0, repeated).index_select(1, repeated)
            rows = (_bicubic(side, height, table.device) @ table.flatten(1)).reshape(height, side + 4, -1)
            table = _bicubic(side, width, table.device) @ rows
        elif (height, width) == (side, side):
            return self.positions
        else:
            planes = F.interpolate(
                table.permute(2, 0, 1).unsqueeze(0), size=(height, width), mode="bicubic", align_corners=False
            )
            table = planes.squeeze(0).permute(1, 2, 0)
        return torch.cat((self.positions[:1], table.flatten(0, 1)))

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"family={self.config.family!r}, width={self.config.width}, image_size={self.config.image_size}"


class AudioStem(nn.Module):
    """A log-mel spectrogram as a row of vectors, one for two frames (Radford et al. 2022).

    Args:
        config: the sizes.
        init: initial values of the positions, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: `init` is not known, or `std` is not above 0.

    """

    def __init__(self, config: AudioConfig, init: Initialiser = "normal", std: float = DEFAULT_STD) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.channels, config.width, 3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.empty(config.positions, config.width))
        initialise_(self.positions, init, std)

    @property
    def signature(self) -> StemSignature:
        """The input, sizes and promises of its graph."""
        config = self.config
        return StemSignature(
            family=config.family,
            width=config.width,
            input="input_features",
            shape=("batch", config.channels, 2 * config.positions),
            rows=config.positions,
            terms=3 * max(config.channels, config.width),
        )

    def forward(self, input_features: Tensor) -> Tensor:
        """Return the vectors (B, N, D) entering block 0.

        Args:
            input_features: float (B, C, F), F exactly 2 N.

        Raises:
            ValueError: the channels or the frames are others.

        """
        if not torch.compiler.is_exporting():
            self.signature.check(input_features.shape)
        x = F.gelu(self.conv2(F.gelu(self.conv1(input_features))))
        return x.transpose(1, 2) + self.positions

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"family={self.config.family!r}, width={self.config.width}, positions={self.config.positions}"


Stem = PatchStem | AudioStem
KINDS: dict[str, type[StemConfig]] = {config.kind: config for config in (PatchConfig, AudioConfig)}


def from_tensors(config: StemConfig, tensors: Mapping[str, Tensor]) -> Stem:
    """Build the stem of `config` around `tensors`, named as in `state_dict()`, without a second copy of them.

    Raises:
        RuntimeError: a tensor is missing, of another shape, or not of this stem.

    """
    stem = without_storage(config)
    stem.load_state_dict(dict(tensors), strict=True, assign=True)
    return stem


def without_storage(config: StemConfig) -> Stem:
    """Return the stem of `config` without storage: its signature, and the names and shapes of its tensors."""
    with torch.device("meta"):
        return PatchStem(config) if isinstance(config, PatchConfig) else AudioStem(config)


def _bicubic(side: int, size: int, device: torch.device) -> Tensor:
    """Return the matrix (size, side + 4) to resample `side` values to `size`, corners not aligned (Keys 1981).

    The first and the last value stand two more times beside the others. Places are rounded to float32, as those of
    `torch.nn.functional.interpolate` are; the weights, with a = -3/4, are exact.
    """
    step = (side / torch.full((), size, dtype=torch.float32, device=device)).double()
    middles = torch.ones(size, dtype=torch.float64, device=device).cumsum(0) - 0.5
    places = (middles * step - 0.5).float().double()
    values = torch.tensor([float(value) for value in range(-2, side + 2)], dtype=torch.float64, device=device)
    distance = (places.unsqueeze(1) - values).abs()
    near = (1.25 * distance - 2.25) * distance * distance + 1
    far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0)).float()
