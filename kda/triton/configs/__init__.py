# SPDX-License-Identifier: Apache-2.0
"""Launch configurations: which tile sizes, warps and stages a kernel runs with.

`DEFAULTS` is the sane choice for any device, as a function of shapes and of what the device has. A device's measured table
is a module beside this one (nvidia_h200.py; `python -m kda tune` writes them) and overrides single entries in regimes of
shapes (regimes.py). Nothing is tuned on a user's first call.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kda.triton.configs import regimes, table


CHUNK = 16  # tokens: [C, C] tiles fit one instruction of a tensor core, and a gate bounded by -5 needs no levels


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (and >= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def _recurrent(V: int, device: torch.device, **_) -> dict:
    # A [BV, K] slice of one head's state lives in registers; small slices keep many programs in flight on a GPU. On a
    # CPU the state of a single token streams through the processor row by row.
    on_cpu = device.type == "cpu"
    BV = min(next_power_of_2(V), 128 if on_cpu else 8)
    return {"BV": BV, "STREAM": on_cpu, "num_warps": 1, "num_stages": 3}


@functools.cache
def _warp_size(device: torch.device) -> int:
    if device.type != "cuda" or torch.version.hip is None:
        return 32
    return getattr(torch.cuda.get_device_properties(device), "warp_size", 32)


def _decode(K: int, V: int, itemsize: int, device: torch.device, **_) -> dict:
    # One program sees all of a value head, for its norm. On a GPU the state passes through registers, 128 a thread (64
    # where q, k and the decay take more of them): at 128 x 128 in fp32 all of it at once. A row of K lies in 8 lanes of 16
    # bytes, so that a sum over it takes few shuffles. Not a function of the number of requests, although many of them gain
    # from other slices than few (nvidia_h200.py): a request gives the same bits alone and among others.
    BK, BV = next_power_of_2(K), next_power_of_2(V)
    if device.type == "cpu":
        return {"BV": BV, "KI": BK, "STREAM": True, "num_warps": 1, "num_stages": 1}
    threads = min(max(BK, 32), 64 if itemsize == 2 else 128)
    return {
        "BV": min(BV, (128 if BK <= 128 else 64) * threads // BK, 128), "KI": min(BK, 128 // itemsize), "STREAM": False,
        "num_warps": max(threads // _warp_size(device), 1), "num_stages": 1,
    }  # fmt: skip


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _large_shared_memory(device: torch.device) -> bool:
    """Hopper and data-centre Blackwell: over 200 KiB a block."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def rdna(device: torch.device) -> bool:
    """AMD's graphics chips: small register files, and Triton 3.6 fails to compile some pipelined loops for them."""
    return device.type == "cuda" and torch.version.hip is not None and _warp_size(device) == 32


def _lane_products(device: torch.device) -> bool:
    """RDNA2 has no matrix instructions: products of tiles are done in vector registers, lane by lane."""
    return rdna(device) and getattr(torch.cuda.get_device_properties(device), "gcnArchName", "").startswith("gfx10")


def fp32_products(device: torch.device) -> str:
    """How fp32 operands enter a product and stay fp32: three TF32 products on NVIDIA's tensor cores."""
    return "tf32x3" if device.type == "cuda" and torch.version.hip is None else "ieee"


def _chunk(
    N: int, HV: int, K: int, V: int, dtype: torch.dtype, device: torch.device, bounded: bool = True, **_
) -> dict:  # fmt: skip
    cfg = {"C": CHUNK, "PRECISION": fp32_products(device)}  # plain TF32 would leave 1.2e-3 in the output
    if dtype == torch.bfloat16 and 64 < K <= 128:
        intra = {"num_warps": 1, "num_stages": 1}
        if not bounded:  # levels take more registers than one warp has
            intra["num_warps"] = 2
        large, parts, BV, walk = _large_shared_memory(device), 1 if device.type == "cpu" else 2, 64, 4
        if rdna(device):  # of 64 channels at once the compiler spills 130 to 280 registers a lane, of 32 up to 20
            parts = 4
        if _lane_products(device):
            intra["num_warps"], BV, walk = 4, 32, 8
        return cfg | {
            "BV": min(next_power_of_2(V), BV), "PARTS": parts,
            "intra": intra, "walk": {"num_warps": walk, "num_stages": 5 if large else 1 if rdna(device) else 2},
        }  # fmt: skip
    # A program takes a slice of V: on a GPU narrower slices where heads are few.
    BV = min(max(next_power_of_2(V), 16), 64 if K <= 128 else 32)
    while device.type != "cpu" and BV > 16 and N * HV * -(-V // BV) < 128:
        BV //= 2
    return cfg | {
        "BV": BV, "PARTS": 2 if K > 128 else 1,
        "intra": {"num_warps": 4, "num_stages": 1},
        "walk": {"num_warps": 4 if BV >= 32 else 2, "num_stages": 1},
    }  # fmt: skip


def _chunk_combine(device: torch.device, **_) -> dict:
    # [K, K] in fp32, and its bf16 halves, pass through shared memory: more than one at a time only where there is room.
    if device.type == "cuda" and torch.version.hip is not None:
        return {"BV": 16, "num_warps": 4, "num_stages": 1}
    return {"BV": 32, "num_warps": 8, "num_stages": 3 if _large_shared_memory(device) else 1}


def _speculative(K: int, V: int, itemsize: int, device: torch.device, **_) -> dict:
    # As in decode, but a state stays for all tokens of a window: on a CPU in slices that its nearest cache holds.
    cfg = _decode(K=K, V=V, itemsize=4, device=device)
    KI = cfg["KI"] if device.type == "cpu" else min(next_power_of_2(K), 128 // itemsize)
    BV = min(cfg["BV"], 64) if device.type == "cpu" else cfg["BV"]
    warps = cfg["num_warps"] * (2 if rdna(device) else 1)  # a window's rows beside the state are too much for RDNA's lanes
    return {"BV": BV, "KI": KI, "num_warps": warps, "num_stages": 1}


def _conv_fwd(dim: int, device: torch.device, **_) -> dict:
    # BT >= W - 1: only the program of a sequence's first chunk touches its conv state. A lane takes 4 channels.
    BT, BD = (8, 64) if device.type == "cpu" else (16, 4 * _warp_size(device))
    return {"BT": BT, "BD": min(next_power_of_2(dim), BD), "num_warps": 1}


def _conv_update(dim: int, window: int, **_) -> dict:
    return {"BT": min(next_power_of_2(window), 8), "BD": min(next_power_of_2(dim), 256), "num_warps": 2}


def _gate(T: int, HV: int, K: int, **_) -> dict:
    BH = min(next_power_of_2(HV), max(2048 // next_power_of_2(K), 1))
    return {"BT": min(next_power_of_2(T // 1024), 8), "BH": BH, "num_warps": 4}


def _norm(D: int, rows: int, device: torch.device, **_) -> dict:
    # The tile follows from D alone: the order of summation, that of a product, must not depend on how many rows there are.
    # Warps share its elements, not its sums: two where there are programs enough.
    BD = min(max(next_power_of_2(D), 16), 128)
    return {
        "BR": min(2048 // BD, 64), "BD": BD, "PRECISION": fp32_products(device), "num_warps": 4 if rows <= 1 << 16 else 2,
    }  # fmt: skip


def _checkpoints(entries: int, dim: int, **_) -> dict:
    return {"B": min(next_power_of_2(entries), 64), "BD": min(next_power_of_2(dim), 512), "num_warps": 4}


def _states(size: int, **_) -> dict:
    return {"BS": min(next_power_of_2(size), 4096), "num_warps": 4}


DEFAULTS: dict[str, Callable[..., dict]] = {
    "causal_conv1d_fwd": _conv_fwd,
    "causal_conv1d_update": _conv_update,
    "fused_kda_gate": _gate,
    "rms_norm_gated": _norm,
    "states": _states,
    "checkpoints": _checkpoints,
    "chunk": _chunk,
    "chunk_combine": _chunk_combine,
    "fused_recurrent": _recurrent,
    "kda_decode": _decode,
    "kda_verify": _speculative,
    "kda_commit": _speculative,
}


OPTIONS = {"num_warps", "num_stages", "maxnreg", "waves_per_eu"}  # that any kernel takes, default or not

# A sweep's: entries by part (regimes.parts) that come before all others. They hold for launches that nothing prepared
# earlier, so whoever changes them forgets those (kda.known.forget).
overrides: dict[str, dict] = {}


def pick(kernel: str, **shape) -> dict:
    """The configuration of `kernel` for these shapes: constexprs, `num_warps` and `num_stages`."""
    chosen = DEFAULTS[kernel](**shape)
    measured = table.of(shape["device"]) if "device" in shape else {}
    for part in regimes.parts(kernel):
        if part in measured:
            regime = regimes.find(part, shape)
            row = measured[part].get(regime)
            if row is not None:
                unknown = row.config.keys() - chosen.keys() - OPTIONS
                if unknown:
                    raise ValueError(
                        f"the table of {table.device_name(shape['device'])} in kda/triton/configs/ is of another version: "
                        f"{part}, {regime} has {', '.join(sorted(unknown))}, which this kernel does not take; remove the row and "
                        "tune again"
                    )
                chosen = chosen | row.config
        if part in overrides:
            chosen = chosen | overrides[part]
    return chosen


# Some shape that every default can answer for.
_ANY = dict(
    N=1, HV=64, K=128, V=128, D=128, T=8192, rows=1, dim=24576, window=1, size=1, entries=1, itemsize=4, dtype=torch.bfloat16
)  # fmt: skip


def stale(device: torch.device) -> list[str]:
    """Rows of the device's table that are of another version, each with what this one does not know about it."""
    kernels, found = {part: kernel for kernel in DEFAULTS for part in regimes.parts(kernel)}, []
    for part, rows in table.of(device).items():
        for regime, row in rows.items():
            if regime not in regimes.REGIMES.get(part, {}):
                found.append(f"{part}, {regime} is no regime")
            elif unknown := row.config.keys() - DEFAULTS[kernels[part]](**_ANY, device=device).keys() - OPTIONS:
                found.append(f"{part}, {regime} has {', '.join(sorted(unknown))}")
    return found
