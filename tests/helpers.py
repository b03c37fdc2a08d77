# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the backends of this machine, input makers, layouts, guards and the contract's bounds."""

import contextlib
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import oracle
import pytest
import torch

import kda

ROOT = Path(__file__).resolve().parent.parent
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
NULL = 0  # the null slot

# ---------------------------------------------------------------------------------------------------------------------
# Backends. With a GPU the kernels run on it and the reference on the CPU; without one the kernels run natively on the
# CPU, or under TRITON_INTERPRET=1 in Triton's interpreter, which is slow: its shapes are small.

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
if GPU:
    KERNELS = "triton-rocm" if torch.version.hip else "triton-cuda"
else:
    KERNELS = "triton-interpret" if INTERPRETED else "triton-cpu"
DEVICE = {"reference": torch.device("cpu"), KERNELS: torch.device("cuda" if GPU else "cpu")}
NAMES = ["reference", KERNELS]
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


@dataclass(frozen=True)
class Backend:
    name: str
    device: torch.device

    @property
    def forced(self):
        """What `kda.use_backend` is given to get this backend."""
        return "reference" if self.name == "reference" else "triton"


def on_backends(names, everywhere, compiled=(), gpu=(), ids=None):
    """Parametrise over backend x case. The interpreter runs `everywhere`, the reference `compiled` too, a GPU all."""
    params = []
    for name in NAMES:
        cases = list(everywhere) + (list(compiled) if name != "triton-interpret" else [])
        cases += list(gpu) if name == KERNELS and GPU else []
        for case in cases:
            values = case if isinstance(case, tuple) and "," in names else (case,)
            label = ids(case) if ids else "-".join(map(str, values))
            params.append(pytest.param(name, *values, id=f"{name}-{label}"))
    return pytest.mark.parametrize(f"backend,{names}", params, indirect=["backend"])


def dtype_id(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def gpu_subset(predicate):
    """Of the compiled kernels' cases, those for which `predicate(**parameters)` holds run on a GPU."""
    return pytest.mark.gpu_subset.with_args(predicate)


def wanted_on_gpu(item):
    marks, call = list(item.iter_markers("gpu_subset")), getattr(item, "callspec", None)
    if call is None or call.params.get("backend") != KERNELS:
        return True
    return all(mark.args[0](**call.params) for mark in marks)


bf16_on_gpu = gpu_subset(lambda dtype, **_: dtype == BF16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)

# ---------------------------------------------------------------------------------------------------------------------
# Accuracy: contract section 7.

BOUNDS = {
    BF16: {"output": 0.0040, "state": 0.0028},
    FP16: {"output": 0.0010, "state": 0.0010},
    FP32: {"output": 2e-5, "state": 2e-5},
}


def assert_accurate(got, ref, dtype, what="output"):
    """`what`: the "output" or the final "state" of an op whose inputs have `dtype`."""
    assert got.isfinite().all(), f"{what}: {int((~got.isfinite()).sum())} of {got.numel()} values are not finite"
    error, bound = oracle.err(got, ref), BOUNDS[dtype][what]
    assert error <= bound, f"{what} error {error:.2e} is over the contract's {bound:.1e} for {dtype} inputs"


def state_dtype_of(dtype, stored):
    """The row of the table that a state answers to: stored in bf16 it carries bf16 rounding whatever the inputs."""
    return BF16 if stored == BF16 else dtype


# ---------------------------------------------------------------------------------------------------------------------
# Guards.


def storage(x):
    """Every byte behind `x`, gaps of a strided view included."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


@contextlib.contextmanager
def unchanged(*tensors):
    """No byte behind these tensors changes inside the block."""
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    before = [storage(x).clone() for x in tensors]
    yield
    for x, bytes_before in zip(tensors, before):
        assert torch.equal(storage(x), bytes_before), f"a {tuple(x.shape)} {x.dtype} tensor was written"


def call(op, /, *args, written=(), **kwargs):
    """Call `op`; no tensor argument may change but those named in `written` and what shares their storage."""
    spared = {kwargs[name].untyped_storage().data_ptr() for name in written if kwargs.get(name) is not None}
    every = [x for x in itertools.chain(args, kwargs.values()) if isinstance(x, torch.Tensor)]
    with unchanged(*(x for x in every if x.untyped_storage().data_ptr() not in spared)):
        return op(*args, **kwargs)


def frame(x, fill=float("nan"), before=3, after=5, rows=2):
    """A view of `x`'s shape and values inside a larger buffer: column slice, rows before and after, all else `fill`.

    For x [B, T, ...] the tokens are rows of a [B, T + 2 rows, columns] buffer: neither the token stride nor the batch
    stride is dense, and the first column is not aligned.
    """
    B, T = x.shape[:2]
    width = x[0, 0].numel() if x.numel() else max(1, int(torch.tensor(x.shape[2:]).prod()))
    buffer = torch.full((B, T + 2 * rows, before + width + after), fill, dtype=x.dtype, device=x.device)
    view = buffer[:, rows:rows + T, before:before + width]
    view = view.unflatten(-1, x.shape[2:]) if x.ndim > 3 else (view if x.ndim == 3 else view[..., 0])
    view.copy_(x)
    return view


def outside(view):
    """Mask over the storage elements of `view`'s dtype that the view does not cover."""
    flat = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    mask = torch.ones(flat.numel(), dtype=torch.bool, device=view.device)
    mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return flat, mask


def assert_only_view_written(view, fill=float("nan")):
    """The buffer around an `out=` made by `frame` still holds `fill`."""
    flat, mask = outside(view)
    rest = flat[mask]
    assert rest.isnan().all() if fill != fill else (rest == fill).all(), "written outside of the out= view"


def subprocess_python(code, timeout=300, **env):
    """Run `code` in a fresh interpreter with the repository importable; returns its CompletedProcess."""
    clean = {k: v for k, v in os.environ.items() if k not in ("KDA_BACKEND", "KDA_CHECK", "TRITON_INTERPRET")}
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), clean.get("PYTHONPATH", "")]))
    return subprocess.run([sys.executable, "-c", code], env={**clean, "PYTHONPATH": path, **env}, cwd=ROOT,
                          capture_output=True, text=True, timeout=timeout)


# ---------------------------------------------------------------------------------------------------------------------
# Inputs. Made on the CPU from a seed, so that every backend sees the same numbers.


def randn(*shape, seed, dtype=FP32, device="cpu", scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to(device=device, dtype=dtype)


def rand(*shape, seed, device="cpu"):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def starts(lens):
    return [0, *itertools.accumulate(lens)]


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


@dataclass
class Inputs:
    """Token inputs of the rule. `lens`: packed sequences, B == 1; None: B sequences of T tokens."""

    q: torch.Tensor  # [B, T, H, K]
    k: torch.Tensor  # [B, T, H, K]
    v: torch.Tensor  # [B, T, HV, V]
    g: torch.Tensor  # [B, T, HV, K], raw
    beta: torch.Tensor  # [B, T, HV] or [B, T, HV, V], logits
    A_log: torch.Tensor  # [H]
    g_bias: torch.Tensor  # [H * K]
    lower_bound: float | None  # None: unbounded
    initial_state: torch.Tensor  # [N, HV, V, K]
    lens: list | None = None
    l2norm: bool = True
    extra: dict = field(default_factory=dict)

    @property
    def N(self):
        return len(self.lens) if self.lens is not None else self.q.shape[0]

    @property
    def device(self):
        return self.q.device

    @property
    def dtype(self):
        return self.q.dtype

    @property
    def cu_list(self):
        return None if self.lens is None else starts(self.lens)

    @property
    def cu(self):
        return None if self.lens is None else ints(self.cu_list, self.device)

    def log_decay(self):
        """y [B, T, HV, K] fp32: what `chunk_kda` takes as `g`."""
        return oracle.gate(self.g, self.A_log, self.g_bias, self.lower_bound).float()

    def oracle(self, **overrides):
        args = dict(A_log=self.A_log, g_bias=self.g_bias, lower_bound=self.lower_bound, sigmoid_beta=True,
                    l2norm_qk=self.l2norm, initial_state=self.initial_state, cu_seqlens=self.cu_list)
        args.update(overrides)
        tokens = {name: args.pop(name, getattr(self, name)) for name in ("q", "k", "v", "g", "beta")}
        return oracle.kda(**tokens, **args)


def make(lens=None, *, B=1, T=None, H=2, HV=None, K=32, V=16, dtype=BF16, device="cpu", gate="bounded", headwise=False,
         l2norm=True, state_dtype=FP32, seed=0):
    """Inputs as a layer sees them. gate: "bounded", "unbounded", or "steep" (unbounded, some y from -1e3 to -1e4)."""
    HV = HV or H
    T = sum(lens) if lens is not None else T
    N = len(lens) if lens is not None else B
    put = dict(dtype=dtype, device=device)
    seed = 1000 * seed
    q, k = (randn(B, T, H, K, seed=seed + i, **put) for i in (1, 2))
    if not l2norm:  # keys of length K**0.5 make the rule diverge: normalise what the kernel will not
        q, k = (oracle.l2norm(x.double()).to(dtype) for x in (q, k))
    raw = randn(B, T, HV, K, seed=seed + 4)
    A_log, g_bias = rand(H, seed=seed + 5).clamp(min=0.01).log(), randn(H * K, seed=seed + 6) * 0.1
    if gate == "unbounded":
        raw = raw - 1.0
    if gate == "steep":
        A_log = torch.full((H,), 16.0).log()
        raw = raw - 6.0  # decays near one ...
        hits = rand(B, T, HV, K, seed=seed + 7) < 0.05
        raw = torch.where(hits, 60.0 + 560.0 * rand(B, T, HV, K, seed=seed + 8), raw)  # ... and y down to -1e4
    return Inputs(
        q=q, k=k, v=randn(B, T, HV, V, seed=seed + 3, **put), g=raw.to(**put),
        beta=randn(*((B, T, HV, V) if headwise else (B, T, HV)), seed=seed + 9, **put),
        A_log=A_log.to(device), g_bias=g_bias.to(device), lower_bound=-5.0 if gate == "bounded" else None,
        initial_state=randn(N, HV, V, K, seed=seed + 10, scale=0.1, device=device).to(state_dtype),
        lens=None if lens is None else list(lens), l2norm=l2norm,
    )


def merged(x):
    """`x` with q, k, v as column slices of one projection, beta of another, g of a third; NaN everywhere else.

    Rows before and after the tokens make the batch stride non-dense; the columns start where tensors do not align.
    """
    B, T = x.q.shape[:2]
    parts = [x.q.flatten(2), x.k.flatten(2), x.v.flatten(2)]
    qkv = frame(torch.cat(parts, -1), before=8, after=24, rows=3)
    q, k, v = (s.unflatten(-1, p.shape[2:]) for s, p in
               zip(qkv.split([p.shape[-1] for p in parts], -1), (x.q, x.k, x.v)))
    return replace(x, q=q, k=k, v=v, g=frame(x.g, before=1), beta=frame(x.beta, before=5))


def head_major(x):
    """`x` stored [B, heads, T, dim] and handed over transposed: the token stride is the smaller one."""
    turn = lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    return replace(x, q=turn(x.q), k=turn(x.k), v=turn(x.v), g=turn(x.g))


def replace(x, **fields):
    values = {name: getattr(x, name) for name in x.__dataclass_fields__}
    return Inputs(**{**values, **fields})


# ---------------------------------------------------------------------------------------------------------------------
# The operations, called the way the tests call them: inputs guarded, keyword names as the contract has them.


def chunk(x, *, fused=True, output_final_state=True, **overrides):
    """`chunk_kda_with_fused_gate` (or, `fused=False`, `chunk_kda` on the log decay) on `x`."""
    args = dict(q=x.q, k=x.k, v=x.v, beta=x.beta, initial_state=x.initial_state, sigmoid_beta=True,
                output_final_state=output_final_state, use_qk_l2norm_in_kernel=x.l2norm, cu_seqlens=x.cu)
    if fused:
        args.update(raw_g=x.g, A_log=x.A_log, g_bias=x.g_bias, safe_gate=x.lower_bound is not None)
        args.update({} if x.lower_bound is None else dict(lower_bound=x.lower_bound))
    else:
        args.update(g=x.log_decay())
    args.update(overrides)
    op = kda.chunk_kda_with_fused_gate if fused else kda.chunk_kda
    return call(op, written=("out",), **args)


def recurrent(x, *, state, **overrides):
    """`fused_recurrent_kda` with the gate in the kernel. `state`: the pool or [N, HV, V, K]; written in place."""
    args = dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, initial_state=state, use_qk_l2norm_in_kernel=x.l2norm,
                cu_seqlens=x.cu, sigmoid_beta=True, a_log=x.A_log, g_bias=x.g_bias, compute_gate=True,
                lower_bound=x.lower_bound)
    args.update(overrides)
    return call(kda.fused_recurrent_kda, written=("initial_state", "out"), **args)


def pool_of(rows, slots, extra=3, fill=float("nan"), pad=0):
    """A state pool whose slot `slots[n]` holds `rows[n]`; every other slot, the null slot included, holds `fill`.

    `pad`: elements between two slots, as a page pool leaves them.
    """
    count, size = max([*slots, 0]) + 1 + extra, rows[0].numel()
    backing = torch.full((count, size + pad), fill, dtype=rows.dtype, device=rows.device)
    pool = backing[:, :size].unflatten(-1, rows.shape[1:])
    for n, slot in enumerate(slots):
        if slot > NULL:
            pool[slot] = rows[n]
    return pool


# ---------------------------------------------------------------------------------------------------------------------
# Requests: the stages of one layer between its projections, over pools, as a serving engine drives them.


class Mixer:
    """Convolution, gate and rule with their state pools. A request is known by its slot; unused slots hold NaN."""

    def __init__(self, device, dtype=FP32, H=2, K=32, V=16, W=4, slots=8, state_dtype=FP32, drafts=0):
        self.device, self.dtype, self.H, self.K, self.V, self.W = device, dtype, H, K, V, W
        self.dim = H * (2 * K + V)
        self.weight = randn(self.dim, W, seed=91, device=device, scale=0.5)
        self.A_log, self.g_bias = rand(H, seed=92, device=device).log(), randn(H * K, seed=93, device=device)
        self.conv_pool = torch.full((slots, W - 1 + drafts, self.dim), float("nan"), dtype=dtype, device=device)
        self.conv_pool = self.conv_pool.transpose(1, 2)
        self.pool = torch.full((slots, H, V, K), float("nan"), dtype=state_dtype, device=device)

    def tokens(self, T, seed, fill=None):
        """The projections of T tokens: {"qkv" [T, dim], "g" [T, H, K], "beta" [T, H]}."""
        put = dict(dtype=self.dtype, device=self.device)
        made = dict(qkv=randn(T, self.dim, seed=seed, **put), g=randn(T, self.H, self.K, seed=seed + 1, **put),
                    beta=randn(T, self.H, seed=seed + 2, **put))
        return made if fill is None else {n: torch.full_like(t, fill) for n, t in made.items()}

    def heads(self, qkv):
        """q, k, v [1, T, H, .] as column slices of the convolved [T, dim]."""
        HK = self.H * self.K
        return tuple(t.unflatten(-1, (self.H, -1))[None] for t in qkv.split([HK, HK, self.H * self.V], -1))

    def prefill(self, rows):
        """rows: (tokens, slot, has_initial_state). Returns o [T, H, V] of each."""
        x = {n: torch.cat([r[0][n] for r in rows]) for n in ("qkv", "g", "beta")}
        lens = [len(r[0]["qkv"]) for r in rows]
        cu, index = ints(starts(lens), self.device), ints([r[1] for r in rows], self.device)
        has = torch.tensor([r[2] for r in rows], dtype=torch.bool, device=self.device)
        return list(self.packed(x, cu, index, has).split(lens))

    def packed(self, x, cu, index, has):
        """Prefill of packed tokens, from device tensors alone. Returns o [T, H, V]."""
        y = kda.causal_conv1d_fn(x["qkv"].T, self.weight, None, self.conv_pool, cu, index, has)
        q, k, v = self.heads(y.T)
        initial = kda.gather_initial_states(self.pool, index, has)
        o, final = kda.chunk_kda_with_fused_gate(
            q, k, v, x["g"][None], x["beta"][None], self.A_log, self.g_bias, initial_state=initial, safe_gate=True,
            output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu, sigmoid_beta=True)
        kda.scatter_states(self.pool, final, index)
        return o[0]

    def decode(self, rows):
        """rows: (tokens, slot), one token each. Returns o [1, H, V] of each."""
        x = {n: torch.cat([r[0][n] for r in rows]) for n in ("qkv", "g", "beta")}
        index = ints([r[1] for r in rows], self.device)
        y = kda.causal_conv1d_update(x["qkv"], self.conv_pool, self.weight, activation="silu",
                                     conv_state_indices=index)
        q, k, v = (t[0][:, None] for t in self.heads(y))
        o, _ = kda.fused_recurrent_kda(
            q, k, v, x["g"][:, None], x["beta"][:, None], initial_state=self.pool, ssm_state_indices=index,
            sigmoid_beta=True, a_log=self.A_log, g_bias=self.g_bias, compute_gate=True)
        return list(o.flatten(0, 1).split(1))

    def verify(self, rows, table, conv_slots, accepted):
        """rows: tokens of one window each. Returns o [window, H, V] of each."""
        x = {n: torch.stack([r[n] for r in rows]) for n in ("qkv", "g", "beta")}
        counts = ints(accepted, self.device)
        y = kda.causal_conv1d_update(x["qkv"].transpose(1, 2), self.conv_pool, self.weight, activation="silu",
                                     conv_state_indices=ints(conv_slots, self.device), num_accepted_tokens=counts)
        q, k, v = (t[0].unflatten(0, (len(rows), -1)) for t in self.heads(y.transpose(1, 2).flatten(0, 1)))
        o, _ = kda.fused_recurrent_kda(
            q, k, v, x["g"], x["beta"], initial_state=self.pool, ssm_state_indices=ints(table, self.device),
            num_accepted_tokens=counts, sigmoid_beta=True, a_log=self.A_log, g_bias=self.g_bias, compute_gate=True)
        return list(o)

    def oracle(self, x, state=None):
        """o [T, H, V] and final state of one request from its first token on, in one piece.

        The rule is the oracle's; it is fed by one uncut convolution, whose output is rounded to the activation dtype.
        """
        T = len(x["qkv"])
        y = kda.causal_conv1d_fn(x["qkv"].T, self.weight, None, None, ints([0, T], self.device))
        q, k, v = self.heads(y.T)
        o, final = oracle.kda(q, k, v, x["g"][None], x["beta"][None], A_log=self.A_log, g_bias=self.g_bias,
                              lower_bound=-5.0, sigmoid_beta=True, initial_state=state)
        return o[0], final[0]


def cut(x, a, b):
    """Tokens a to b of a Mixer's tokens."""
    return {n: t[a:b] for n, t in x.items()}
