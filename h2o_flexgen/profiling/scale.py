"""How much of a machine is measured: sizes of what is timed, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from h2o_flexgen.offload.device import Device
from h2o_flexgen.planning.profile import Shape


@dataclass(frozen=True)
class Scale:
    """Sizes of what is timed. The defaults are for a CPU; tests take smaller ones.

    Attributes:
        shapes: (out, in) of the matrices: small and large, tall and wide as in an MLP, and a vocabulary head. All but
            the first are left out where they would take more than a quarter of the free memory.
        rows: of the matmuls with each; with a head, at most as many as the engine puts through it at once.
        weight_bytes: of the matrices of a shape, which take turns, so that each comes from memory and not from a cache.
        logits: (sequences, words) from which tokens are chosen.
        prompt: tokens of a prompt in attention; short: of one so short that what a head takes anyway shows.
        sequences: times as many in attention over a cache.
        cold_bytes: written between two calls, so that the second finds nothing in the caches.
        transfer_bytes: of a large transfer; file_bytes: of the file that is written and read by such transfers.
        small_bytes: of a small transfer by link: a KV block that is read, a row that is written.
        disk_seconds: a slow disk is not used for longer at a time.
        call_seconds: a call is repeated for so long.
        passes: over everything; medians count, since other users of a machine come and go.
    """

    shapes: tuple[Shape, ...] = ((768, 768), (2048, 2048), (8192, 2048), (2048, 8192), (50272, 768))
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 1024)
    weight_bytes: int = 1 << 27
    logits: tuple[int, int] = (32, 50272)
    prompt: int = 512
    short: int = 32
    sequences: int = 1
    cold_bytes: int = 1 << 25
    transfer_bytes: int = 1 << 26
    file_bytes: int = 1 << 29
    small_bytes: dict[str, int] = field(default_factory=lambda: {"disk_to_cpu": 1 << 22, "cpu_to_disk": 1 << 18})
    disk_seconds: float = 1.5
    call_seconds: float = 0.06
    passes: int = 3


#: smaller matrices would measure how fast the host launches kernels
CUDA = Scale(
    shapes=((2048, 2048), (4096, 4096), (16384, 4096), (4096, 16384), (50272, 4096)),
    weight_bytes=1 << 28,
    sequences=8,
    cold_bytes=1 << 27,
)


def scale_for(device: Device) -> Scale:
    return CUDA if device.is_cuda else Scale()
