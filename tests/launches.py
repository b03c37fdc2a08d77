# SPDX-License-Identifier: Apache-2.0
"""Every kernel launch of the public operations, as a GPU would see it, on a machine without one.

`python launches.py TARGET` calls the operations on pretended GPU tensors (shapes and dtypes, no data: reading a value
raises) under a driver that names TARGET, and compiles each launch as the JIT would instead of launching it. It prints
one JSON line before and one after each: {"op", "kernel", "grid"} and, if compiled, {"ok", "error", "seconds"}.
`python launches.py TARGET --grids` does not compile, and takes the shapes of a large deployment.
"""

import json
import os
import sys
import time
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

TARGETS = {
    "sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64), "gfx1100": ("hip", "gfx1100", 32),
    "gfx1201": ("hip", "gfx1201", 32),
}
# Compiled for one target of each vendor: it takes its kernel another quarter of a minute on some.
ONE_TARGET = {"chunk_kda/batch": ("sm_90", "gfx942")}
BF16, FP32, INT = torch.bfloat16, torch.float32, torch.int32


class Pretended(torch.Tensor):
    """A meta tensor that says it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)

    @property
    def is_cuda(self):
        return True


class PretendGPU(TorchFunctionMode):
    """Factory calls for the GPU give pretended tensors, and so does every operation on one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Pretended, lambda x: x.as_subclass(torch.Tensor), (args, kwargs or {}))
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "meta"
        return tree_map_only(torch.Tensor, lambda x: x.as_subclass(Pretended) if x.is_meta else x,
                             func(*args, **kwargs))


def tensor(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def operations(kda, *, T, N, H, D=128, W=4, slots=None, window=4):
    """name -> a call of a public operation with tokens as column slices of merged projections."""
    slots = slots or N + 1
    dim = 3 * H * D
    q, k, v = (s.unflatten(-1, (H, D)) for s in tensor(1, T, dim).split(H * D, -1))
    g, beta = tensor(1, T, H, D), tensor(1, T, 2 * H)[..., :H]
    y = tensor(1, T, H, D, dtype=FP32)
    A_log, g_bias = tensor(H, dtype=FP32), tensor(H * D, dtype=FP32)
    cu, index = tensor(N + 1, dtype=INT), tensor(N, dtype=INT)
    table, accepted = tensor(N, window, dtype=INT), tensor(N, dtype=INT)
    has = tensor(N, dtype=torch.bool)
    pool, states = tensor(slots, H, D, D, dtype=FP32), tensor(N, H, D, D, dtype=FP32)
    conv_pool = tensor(slots, W - 1 + window, dim).transpose(1, 2)
    weight, norm_weight = tensor(dim, W, dtype=FP32), tensor(D, dtype=FP32)
    qkv, records = tensor(T, dim), tensor(slots, window, H, 3 * D, dtype=FP32)
    one = dict(q=q[:, :N], k=k[:, :N], v=v[:, :N], g=g[:, :N], beta=beta[:, :N])
    rows = min(T // window, N)
    draft = {n: t[0, :rows * window].unflatten(0, (rows, window))
             for n, t in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
    gate = dict(a_log=A_log, g_bias=g_bias, compute_gate=True)
    fused = dict(A_log=A_log, g_bias=g_bias, use_qk_l2norm_in_kernel=True, sigmoid_beta=True)

    return {
        "causal_conv1d_fn": lambda: kda.causal_conv1d_fn(qkv.T, weight, None, conv_pool, cu, index, has),
        "causal_conv1d_fn/fresh": lambda: kda.causal_conv1d_fn(qkv.T, weight, weight[:, 0].clone(), None, cu),
        "causal_conv1d_update": lambda: kda.causal_conv1d_update(qkv[:N], conv_pool, weight, activation="silu",
                                                                 conv_state_indices=index),
        "causal_conv1d_update/window": lambda: kda.causal_conv1d_update(
            qkv, conv_pool, weight, activation="silu", conv_state_indices=index, num_accepted_tokens=accepted,
            query_start_loc=cu, max_query_len=window),
        "fused_kda_gate/bounded": lambda: kda.fused_kda_gate(g.flatten(2), A_log, D, g_bias, safe_gate=True),
        "fused_kda_gate/unbounded": lambda: kda.fused_kda_gate(g.flatten(2), A_log, D, g_bias),
        "chunk_kda_with_fused_gate": lambda: kda.chunk_kda_with_fused_gate(
            q, k, v, g, beta, initial_state=states, output_final_state=True, cu_seqlens=cu, safe_gate=True, **fused),
        "chunk_kda/batch": lambda: kda.chunk_kda(
            *(t[0].unflatten(0, (2, T // 2)) for t in (q, k, v, y, beta)), use_qk_l2norm_in_kernel=True),
        "chunk_kda_with_fused_gate/segments": lambda: kda.chunk_kda_with_fused_gate(
            *(tensor(1, 1 << 14, 16, D) for _ in "qkvg"), tensor(1, 1 << 14, 16), tensor(16, dtype=FP32),
            tensor(16 * D, dtype=FP32), initial_state=tensor(1, 16, D, D, dtype=FP32), output_final_state=True,
            cu_seqlens=cu[:2], safe_gate=True, use_qk_l2norm_in_kernel=True, sigmoid_beta=True),
        "kda_prefill": lambda: kda.kda_prefill(
            qkv, g[0], beta[0], v[0], conv_pool, pool, index, cu, has, weight, A_log, g_bias, norm_weight),
        "kda_prefill/checkpoints": lambda: kda.kda_prefill(
            qkv, g[0], beta[0], v[0], conv_pool, pool, index, cu, has, weight, A_log, g_bias, norm_weight,
            checkpoint_offsets=index, checkpoint_indices=index),
        "fused_recurrent_kda/decode": lambda: kda.fused_recurrent_kda(
            **one, initial_state=pool, cu_seqlens=cu, ssm_state_indices=index, sigmoid_beta=True, **gate),
        "fused_recurrent_kda/log-decay": lambda: kda.fused_recurrent_kda(
            **{**one, "g": y[:, :N], "beta": tensor(1, N, H, D)}, initial_state=states, cu_seqlens=cu),
        "fused_recurrent_kda/window": lambda: kda.fused_recurrent_kda(
            **draft, initial_state=pool, ssm_state_indices=table[:rows], num_accepted_tokens=accepted[:rows],
            sigmoid_beta=True, **gate),
        "fused_recurrent_kda/states": lambda: kda.fused_recurrent_kda(
            **draft, initial_state=states[:rows], inplace_final_state=False, lower_bound=None, **gate),
        "kda_decode": lambda: kda.kda_decode(
            qkv[:N], g[0, :N], beta[0, :N], v[0, :N], conv_pool, pool, index, weight, A_log, g_bias, norm_weight),
        "kda_decode/grouped": lambda: kda.kda_decode(
            tensor(N, 4 * 256 + 8 * 80), tensor(N, 8, 256), tensor(N, 8), tensor(N, 8, 80),
            tensor(slots, 4 * 256 + 8 * 80, 3), tensor(slots, 8, 80, 256), index, tensor(4 * 256 + 8 * 80, 4),
            tensor(8, dtype=FP32), lower_bound=None, activation="silu"),
        "kda_verify": lambda: kda.kda_verify(
            qkv, g[0], beta[0], v[0], conv_pool, pool, records, index, cu, accepted, weight, A_log, g_bias, norm_weight),
        "kda_verify/grouped": lambda: kda.kda_verify(
            tensor(N, 4 * 256 + 8 * 80), tensor(N, 8, 256), tensor(N, 8), tensor(N, 8, 80),
            tensor(slots, 4 * 256 + 8 * 80, 11), tensor(slots, 8, 80, 256), tensor(slots, 8, 8, 592, dtype=FP32), index,
            cu, None, tensor(4 * 256 + 8 * 80, 4), tensor(8, dtype=FP32), lower_bound=None, activation="silu"),
        "kda_commit": lambda: kda.kda_commit(conv_pool, pool, records, index, accepted),
        "rms_norm_gated": lambda: kda.rms_norm_gated(v[0], g[0], norm_weight, None, activation="sigmoid"),
        "rms_norm_gated/residual": lambda: kda.rms_norm_gated(v[0], g[0], norm_weight, norm_weight, residual=g[0],
                                                              prenorm=True),
        "gather_initial_states": lambda: kda.gather_initial_states(pool, index, has),
        "gather_initial_states/conv": lambda: kda.gather_initial_states(conv_pool, index, has),
        "scatter_states": lambda: kda.scatter_states(pool, states, index),
    }


class PretendedDriver:
    """What the JIT asks of a driver up to the launch."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)


def main(target, compiles):
    if TARGETS[target][0] == "hip":
        torch.version.hip = torch.version.hip or "7.0"  # before anything asks which vendor this is
    else:
        torch.version.hip = None
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction, MockTensor

    import kda

    torch.cuda.current_device = lambda: 0
    properties = SimpleNamespace(multi_processor_count=132, warp_size=TARGETS[target][2])
    torch.cuda.get_device_properties = lambda device: properties
    torch.cuda.is_available = lambda: True
    arch = TARGETS[target][1]  # AMD's is a name, and nobody asks for its number
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10) if isinstance(arch, int) else (9, 4)
    triton.runtime.driver.set_active(PretendedDriver(GPUTarget(*TARGETS[target])))
    jit_run = JITFunction.run
    op = None

    def say(**facts):
        print(json.dumps(facts), flush=True)

    def run(self, *args, grid, warmup, **kwargs):
        facts = dict(op=op, kernel=f"{self.fn.__module__}.{self.fn.__name__}", grid=list(grid))
        if not compiles:
            return say(**facts)
        say(**facts)
        mock = lambda x: MockTensor(x.dtype) if isinstance(x, torch.Tensor) else x  # noqa: E731
        begin = time.perf_counter()
        try:
            jit_run(self, *map(mock, args), grid=grid, warmup=True, **{n: mock(x) for n, x in kwargs.items()})
            outcome = dict(ok=True)
        except Exception as error:
            outcome = dict(ok=False, error=f"{type(error).__name__}: {error}"[:4000])
        say(**facts, **outcome, seconds=round(time.perf_counter() - begin, 2))

    JITFunction.run = run
    with PretendGPU(), kda.use_backend("triton"):
        shape = dict(T=256, N=3, H=16) if compiles else dict(T=1 << 19, N=1 << 17, H=64)
        for op, call in operations(kda, **shape).items():
            if compiles and target not in ONE_TARGET.get(op, TARGETS):
                continue
            try:
                call()
                say(op=op, called=True)
            except Exception as error:
                say(op=op, called=False, error=f"{type(error).__name__}: {error}"[:4000])


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(sys.argv[1], "--grids" not in sys.argv)
