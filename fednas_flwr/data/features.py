"""Public features of images: a fixed transform in front of all networks, and a part of the model.

They are made once per image and cached. :class:`Scattering` learns nothing; a backbone is a network
that was trained on public images. Each image is transformed by itself, because in a batch rounding
would depend on its position. So no bit of its features depends on another record, and they cost no
privacy.

Shapes: B batch, C channels, H height, W width, J scales, L angles, K paths, M and N padded sides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, product

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.memory import check_fits
from fednas_flwr.base.pretrained import Frozen, load_frozen
from fednas_flwr.data.records import Records
from fednas_flwr.settings import Dataset, expanded
from fednas_flwr.settings import data_settings as ds

BACKBONE, SCATTERING = KINDS = ("backbone", "scattering")
MIRRORED, MAP = "mirrored", "map"
Description = tuple[str, ...]  # kind and sizes of a transform; for a backbone also its hash
GROUPS = 27  # groups of a channel's paths that are normalised together
YCBCR = (  # from red, green and blue (ITU-R BT.601, full range), without the offset of Cb and Cr
    (0.299, 0.587, 0.114),
    (-0.168736, -0.331264, 0.5),
    (0.5, -0.418688, -0.081312),
)
Complex = tuple[Tensor, Tensor]  # real and imaginary part


def transform_of(dataset: Dataset) -> Description:
    """Return the description of the transform of images; empty if networks take the records.

    It is ``("scattering", scales, angles)`` or ``("backbone", name, image size, hash)``. Before the
    hash comes ``"mirrored"`` with ``dataset.flip``, by which mirror images mean the same, and
    ``"map"`` if features have positions.

    Raises:
        ConfigError: The backbone's weights cannot be read.
    """
    settings = dataset.transform
    if isinstance(settings, ds.Scattering):
        return SCATTERING, str(settings.scales), str(settings.angles)
    if settings is None:
        return ()
    is_mirrored = isinstance(dataset, ds.Images) and dataset.flip
    backbone = load_backbone(settings, is_mirrored=is_mirrored)
    more = compress((MIRRORED, MAP), (is_mirrored, backbone.is_map))
    return BACKBONE, settings.name, str(backbone.image_size), *more, backbone.digest


def kept_as(described: Description) -> torch.dtype:
    """Return the dtype in which features are stored; maps take half the memory."""
    return torch.float16 if MAP in described[3:] else torch.float32


def make_transform(
    described: Description, shape: Sequence[int], settings: ds.Transform | None = None
) -> Scattering | Frozen | None:
    """Return a described transform for images of a shape; None for an empty description.

    Args:
        described: From :func:`transform_of`.
        shape: ``(C, H, W)`` of an image.
        settings: Settings of the transform, with a backbone's weights; None loads no weights.

    Raises:
        ConfigError: The records are no images, or too small.
    """
    if not described:
        return None
    kind, *sizes = described
    if kind == SCATTERING:
        return Scattering(shape, scales=int(sizes[0]), angles=int(sizes[1]))
    if len(shape) != 3:
        raise ConfigError(
            f"dataset.backbone={sizes[0]} needs images, but the records have the shape "
            f"{tuple(shape)}: set dataset.backbone=null."
        )
    is_mirrored = MIRRORED in sizes[2:]
    if isinstance(settings, ds.Backbone):
        return load_backbone(settings, is_mirrored=is_mirrored)
    return Frozen(sizes[0], int(sizes[1]), is_mirrored=is_mirrored, is_map=MAP in sizes[2:])


def load_backbone(settings: ds.Backbone, *, is_mirrored: bool = False) -> Frozen:
    """Return the frozen network with its weights, which are read once per process.

    Raises:
        ConfigError: The weights cannot be read, or are not those of that network.
    """
    path = settings.weights and expanded("dataset.backbone.weights", settings.weights)
    of_images = {"is_mirrored": is_mirrored, "is_map": settings.output == MAP}
    return load_frozen(settings.name, settings.image_size, path or None, **of_images)


@torch.no_grad()
def transformed(
    records: Records, transform: Scattering | Frozen, dtype: torch.dtype = torch.float32
) -> Records:
    """Return the records with features of ``dtype`` in place of uint8 images.

    A note has their size and the time that they took.

    Raises:
        ConfigError: Features don't fit in memory.
    """
    shape, number = transform.output_shape, len(records)
    kind = BACKBONE if isinstance(transform, Frozen) else SCATTERING
    smaller = "lower dataset.scattering.scales or angles, or " if kind == SCATTERING else ""
    size = number * math.prod(shape) * dtype.itemsize
    check_fits(size, f"dataset.{kind} of {number} images", f"{smaller}set dataset.limit_train")
    started = time.monotonic()
    features, size_mb = torch.empty(number, *shape, dtype=dtype), size / 1e6
    console = Console(stderr=True)
    for row in track(
        range(number),
        description=f"{kind} features of {number} images, {size_mb:.0f} MB",
        console=console,
        disable=not console.is_terminal,
    ):
        features[row] = transform(records.features[row : row + 1].float() / 255)[0]
    took = time.monotonic() - started
    each = f"{1000 * took / max(1, number):.1f} s per 1,000 images"
    note = f"{kind} features: {shape}, {size_mb:.0f} MB, {took:.1f} s, {each}"
    image_shape, notes = tuple(records.features.shape[1:]), (*records.notes, note)
    return replace(records, features=features, image_shape=image_shape, notes=notes)


def num_paths(scales: int, angles: int) -> int:
    """Return K, the number of paths of one channel: ``1 + L J + L^2 J (J - 1) / 2``."""
    return 1 + angles * scales + angles**2 * scales * (scales - 1) // 2


class Scattering(nn.Module):
    """Transform of images into normalised scattering coefficients, each record by itself.

    Wavelets, moduli and averages of two orders (Bruna and Mallat 2013, arXiv 1203.1513); used as
    input of private networks by Tramer and Boneh (2021, arXiv 2011.11660). From these features a
    linear model learns much. Filters and the order of channels are kymatio's (Andreux et al. 2020,
    arXiv 1812.11214). In an ONNX file, which has no complex numbers, Fourier transforms are
    products with matrices of cosines and sines.

    It learns nothing and uses no record but the one it transforms, so it costs no privacy.
    Coefficients are normalised per record, in groups of consecutive channels (Tramer and Boneh
    2021, section 4). Deviations: every channel's paths form 27 groups, or as many as the greatest
    common divisor of 27 and K. Three channels are taken for red, green and blue and become
    brightness and two differences of colours; otherwise edges that are alike in all three would
    fill the features.

    Attributes:
        output_shape: ``(C K, h, w)`` of one record, with sides H and W divided by ``2^J``.
        groups: Number of groups of channels that are normalised together.
    """

    def __init__(self, input_shape: Sequence[int], *, scales: int, angles: int) -> None:
        """Make the filters.

        Args:
            input_shape: ``(C, H, W)``.
            scales: J, at least 1; both sides must be more than ``2^J``.
            angles: L, at least 1.

        Raises:
            ConfigError: The images are too small, or no images.
        """
        super().__init__()
        if len(input_shape) != 3 or min(input_shape[1:]) <= 2**scales:
            raise ConfigError(
                f"dataset.scattering with {scales} scales needs images of sides above "
                f"{2**scales}, but the records have the shape {tuple(input_shape)}: lower "
                "dataset.scattering.scales, or set dataset.scattering=null."
            )
        from kymatio.scattering2d.filter_bank import filter_bank

        channels, *sides = input_shape
        self.scales, self.angles = scales, angles
        # Padding as in kymatio, so that borders are reflected and all resolutions are whole.
        padded = [(side // 2**scales + 2) * 2**scales for side in sides]
        margins = [(whole - side, side) for whole, side in zip(padded, sides, strict=True)]
        (top, _), (left, _) = margins
        self.padding = (left // 2, left - left // 2, top // 2, top - top // 2)
        filters = filter_bank(*padded, scales, angles)
        for resolution in range(scales + 1):
            for axis, side in zip("MN", padded, strict=True):
                index = torch.arange(side // 2**resolution, dtype=torch.float64)
                angle = 2 * math.pi * torch.outer(index, index) / len(index)
                self._add(f"cos{axis}{resolution}", angle.cos())
                self._add(f"sin{axis}{resolution}", angle.sin())
        for resolution, low_pass in enumerate(filters["phi"]["levels"]):
            rows, columns = _averages(torch.from_numpy(low_pass), 2 ** (scales - resolution))
            self._add(f"rows{resolution}", rows)
            self._add(f"columns{resolution}", columns.T)
        for scale in range(scales):
            rotated = [psi["levels"] for psi in filters["psi"] if psi["j"] == scale]
            for resolution in range(len(rotated[0])):
                turned = [torch.from_numpy(levels[resolution]) for levels in rotated]
                self._add(f"psi{scale}_{resolution}", torch.stack(turned))
        output_sides = [side // 2**scales - 2 for side in padded]
        self.output_shape: tuple[int, ...] = (channels * num_paths(scales, angles), *output_sides)
        self.groups = channels * math.gcd(num_paths(scales, angles), GROUPS)
        self.is_coloured = channels == len(YCBCR)
        self._add("colours", torch.tensor(YCBCR))

    def _add(self, name: str, values: Tensor) -> None:
        self.register_buffer(name, values.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 ``[B, C K, h, w]`` of images ``[B, C, H, W]`` scaled to 0..1."""
        if self.is_coloured:
            x = torch.einsum("oc,bchw->bohw", self.get_buffer("colours"), x)
        return nn.functional.group_norm(self.coefficients(x).flatten(1, 2), self.groups)

    def coefficients(self, x: Tensor) -> Tensor:
        """Return the coefficients themselves, ``[B, C, K, h, w]``, as kymatio orders them."""
        signal = nn.functional.pad(x, self.padding, mode="reflect")
        spectrum = self._fourier(signal, 0)
        zeroth = self._average(signal, 0)[:, :, None]
        first, second = [], []
        for scale in range(self.scales):
            moduli = self._moduli(spectrum, f"psi{scale}_0", scale)  # [B, C, L, m, n]
            first.append(self._average(moduli, scale))
            if scale == self.scales - 1:
                break
            inner, deeper = self._fourier(moduli, scale), []
            for next_scale in range(scale + 1, self.scales):
                moduli = self._moduli(inner, f"psi{next_scale}_{scale}", next_scale - scale)
                deeper.append(self._average(moduli, next_scale))
            # [B, C, L, L times larger scales, h, w]
            second.append(torch.cat(deeper, dim=3).flatten(2, 3))
        return torch.cat([zeroth, *first, *second], dim=2)

    def _matrices(self, resolution: int) -> tuple[Tensor, ...]:
        names = (f"{part}{axis}{resolution}" for axis in "MN" for part in ("cos", "sin"))
        return tuple(self.get_buffer(name) for name in names)

    def _fourier(self, x: Tensor, resolution: int) -> Complex:
        """Return the Fourier transform of real ``[..., m, n]``."""
        if not torch.onnx.is_in_onnx_export():
            spectrum = torch.fft.fft2(x)
            return spectrum.real, spectrum.imag
        cos_m, sin_m, cos_n, sin_n = self._matrices(resolution)
        real, imaginary = cos_m @ x, sin_m @ x
        return real @ cos_n - imaginary @ sin_n, -(real @ sin_n + imaginary @ cos_n)

    def _moduli(self, spectrum: Complex, filters: str, halvings: int) -> Tensor:
        """Return the moduli of filtered signals, ``[..., L, m / 2^h, n / 2^h]``."""
        filters_LMN = self.get_buffer(filters)
        real, imaginary = (_filtered(part, filters_LMN, 2**halvings) for part in spectrum)
        if not torch.onnx.is_in_onnx_export():
            return torch.fft.ifft2(torch.complex(real, imaginary)).abs()
        rows, columns = real.shape[-2:]
        resolution = round(math.log2(self.get_buffer("cosM0").shape[0] / rows))
        cos_m, sin_m, cos_n, sin_n = self._matrices(resolution)
        left = cos_m @ real - sin_m @ imaginary
        right = cos_m @ imaginary + sin_m @ real
        real, imaginary = left @ cos_n - right @ sin_n, left @ sin_n + right @ cos_n
        return (real.square() + imaginary.square()).sqrt() / (rows * columns)

    def _average(self, signal: Tensor, resolution: int) -> Tensor:
        """Return the low-passed signal at the coarsest resolution, without its border."""
        along_columns = signal @ self.get_buffer(f"columns{resolution}")
        return self.get_buffer(f"rows{resolution}") @ along_columns


def _filtered(spectrum: Tensor, filters_LMN: Tensor, step: int) -> Tensor:
    """Return the spectra ``[..., L, M / s, N / s]`` of every s-th sample of filtered signals.

    They are means over the ``s^2`` parts of the whole spectrum ``[..., M, N]`` that then coincide.
    """
    height, width = (side // step for side in filters_LMN.shape[1:])
    total = spectrum.new_zeros(())
    for row, column in product(range(step), repeat=2):
        rows = slice(row * height, (row + 1) * height)
        columns = slice(column * width, (column + 1) * width)
        part, filters = (of[..., rows, columns] for of in (spectrum, filters_LMN))
        total = torch.addcmul(total, part.unsqueeze(-3), filters / step**2)
    return total


def _averages(low_pass: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the matrices that filter and subsample both axes, ``[h, m]`` and ``[w, n]``.

    Args:
        low_pass: Frequency response of kymatio's Gaussian [m, n], a product of one per axis.
        step: Every ``step``-th sample stays, except the first and the last, which are padding.
    """
    responses = low_pass[:, 0].double(), low_pass[0].double() / low_pass[0, 0]
    rows, columns = (
        torch.fft.ifft(
            torch.fft.fft(torch.eye(len(response)), dim=0) * response[:, None], dim=0
        ).real
        for response in responses
    )
    return rows[::step][1:-1], columns[::step][1:-1]
