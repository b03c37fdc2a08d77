# SPDX-License-Identifier: Apache-2.0
"""One KDA layer, one step of an engine: decodes, prefills and verify rows through the operations that serve each.

The operations take the tokens of one kind of row side by side. Where a batch has them so, views are passed; tokens that
lie between others are gathered by one launch. Outputs are written where they belong.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kda import known, library
from kda import validation as check
from kda.dispatch import call
from kda.layer_ops import check_draft, check_layer_tokens, kda_decode, layer_rule
from kda.library import operation
from kda.serving.batch import Batch


def kda_forward(
    qkv: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    batch: Batch,
    conv_weight: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    records: Tensor | None = None,
    conv_bias: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    activation: str = "sigmoid",
    eps: float = 1e-5,
    out: Tensor | None = None,
) -> Tensor:
    """All that lies between a KDA layer's projections for one step's tokens, whatever rows they belong to.

    Decodes go through `kda_decode`, prefills through `kda_prefill`, verify rows through `kda_verify` where each has one
    slot and records, or, where it has a slot for each token, through the convolution update, `fused_recurrent_kda` and
    the output norm. It waits for nothing on the device and can be captured in a CUDA graph: shapes and the batch's
    numbers stay, its tensors may change.

    How a request moves through speculation (contract sections 2 and 5 have the equations):

    - With records it enters from `Prefill` or `Decode` as `Verify(slot, tokens, accepted=0)`, since nothing is pending,
      and then names in each step how much of its last window was accepted. It leaves by `Decode(slot, accepted)` or
      `Prefill(.., accepted=)`, which commit that first, or by `Verify(slot, 0, accepted)`, which only commits.
    - With full states it enters as `Verify(slots, tokens, accepted=1)`, slots[0] being the slot that it has had: that
      state is the one after the last window's first token. It leaves by a step of one token, `Verify(slots, 1,
      accepted)`, which leaves its state in slots[0] and its convolution state in plain form, or `StatePool.settle`.

    Args:
        qkv, raw_g, beta, out_gate: packed tokens as in `kda_prefill`, T of them, column slices of projections; the first
            `batch.num_tokens` are those of the batch's rows, what follows is padding and never read.
        conv_state: [slots, dim, columns], any strides, in place; columns W - 1, or with verify rows W - 2 + window and more
            for full states, W - 1 + window and more for records.
        ssm_state: [slots, HV, V, K] fp32 or bf16, `stride(0)` free, each slot dense; in place.
        batch: the rows. Its slots are those of the pools; none is in two rows.
        records: [slots, window, HV, 2 * K + V] fp32, as `kda_verify` takes it; for verify rows of one slot each, and rows
            that leave speculation. `StatePool.records` has one a layer. In place.
        out: [T, HV, V] buffer in the dtype of `qkv`, sharing memory with no input. Tokens that belong to no row stay as
            they are there, and are zero in a fresh output.

    The other arguments are those of `kda_decode`.

    Returns:
        [T, HV, V] in the dtype of `qkv`, in token order. Rows of the null slot, and stale ones, give zeros.

    Raises:
        TypeError: a wrong dtype; ValueError: all else that is wrong. Nothing has been written then.

    Example:
        >>> import torch
        >>> from kda.serving import Batch, Decode, Geometry, Prefill, StatePool, Verify, kda_forward
        >>> H, D, W = 2, 32, 4
        >>> pool = StatePool(8, Geometry(HV=H, V=D, K=D, dim=3 * H * D, W=W, record_tokens=4, conv_dtype=torch.float32))
        >>> a, b, c, prefix = pool.allocate(4, zero=True)
        >>> weights = torch.randn(3 * H * D, W), torch.zeros(H), None, torch.ones(D)
        >>> for rows in ([Prefill(a, 9), Decode(b), Prefill(c, 40, checkpoints={32: prefix})],  # three requests come
        ...              [Decode(b), Verify(a, 3, 0), Prefill(c, 7, True)],  # a drafts two tokens ..
        ...              [Decode(b), Decode(a, 2), Verify(c, 4, 0)]):  # .. one of which was accepted, and stops drafting
        ...     batch = Batch.of(rows, pool=pool)
        ...     T = batch.num_tokens
        ...     qkv, g, gate = torch.randn(T, 3 * H * D), torch.randn(T, H, D), torch.randn(T, H, D)
        ...     o = kda_forward(
        ...         qkv, g, torch.randn(T, H), gate, *pool.layers[0], batch, *weights, records=pool.records[0])
        >>> o.shape
        torch.Size([6, 2, 32])
    """
    if not isinstance(batch, Batch):
        check.refuse("batch", type(batch).__name__, "a kda.serving.Batch", TypeError)
    if batch.only_decodes and isinstance(qkv, Tensor) and qkv.shape[:1] == batch.decode_slots.shape:  # in the least time
        return kda_decode(
            qkv, raw_g, beta, out_gate, conv_state, ssm_state, batch.decode_slots, conv_weight, A_log, g_bias, norm_weight,
            conv_bias=conv_bias, scale=scale, lower_bound=lower_bound, activation=activation, eps=eps, out=out,
        )  # fmt: skip
    return kda_step(
        qkv, raw_g, beta, out_gate, conv_state, ssm_state, conv_weight, A_log, g_bias, norm_weight, records, conv_bias,
        scale, lower_bound, activation, eps, out, **batch.fields,
    )  # fmt: skip


@operation(library.like("qkv", shape="out_gate"), mutates=("conv_state", "ssm_state", "records"))
def kda_step(
    qkv: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    norm_weight: Tensor | None,
    records: Tensor | None,
    conv_bias: Tensor | None,
    scale: float | None,
    lower_bound: float | None,
    activation: str,
    eps: float,
    out: Tensor | None,
    decode_slots: Tensor | None,
    prefill_slots: Tensor | None,
    prefill_query_start_loc: Tensor | None,
    has_initial_state: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
    verify_slots: Tensor | None,
    verify_query_start_loc: Tensor | None,
    num_accepted_tokens: Tensor | None,
    token_indices: Tensor | None,
    verify_token_indices: Tensor | None,
    num_prefill_tokens: int,
    num_verify_tokens: int,
    window: int,
    commit_slots: Tensor | None,
    num_committed_tokens: Tensor | None,
    decode_start: int | None,
    prefill_start: int | None,
    verify_start: int | None,
) -> Tensor:
    """`kda_forward` on the fields of a batch: what torch.compile has to see is tensors and numbers."""
    given = dict(locals())
    batch = Batch.unchecked(given)
    full = verify_slots is not None and verify_slots.dim() == 2
    seen = known.once(_check, given)

    # What launches were is kept under `seen`: no kernel is launched twice in a step but the norm, which the window tags.
    rule = layer_rule(raw_g.shape[2], A_log, g_bias, norm_weight, scale, lower_bound, eps, activation)
    past, drafts = conv_weight.shape[1] - 1, ()
    if records is not None:
        drafts = (conv_state[..., : past + records.shape[1]], ssm_state, records)

    def decode(x: list[Tensor], *outs: Tensor | None) -> Tensor:
        return call(
            "decode", "kda_decode", qkv.device,
            *x, conv_state, ssm_state, decode_slots, conv_weight, conv_bias, *rule, *outs, seen=seen,
        )  # fmt: skip

    def prefill(x: list[Tensor], *outs: Tensor | None) -> Tensor:
        return call(
            "prefill", "kda_prefill", qkv.device,
            *x, conv_state, ssm_state, prefill_slots, prefill_query_start_loc, has_initial_state, conv_weight, conv_bias,
            *rule, checkpoint_offsets, checkpoint_slots, *outs, seen=seen,
        )  # fmt: skip

    def verify(x: list[Tensor], *outs: Tensor | None) -> Tensor:
        rows = (verify_slots, verify_query_start_loc, num_accepted_tokens, conv_weight, conv_bias)
        if not full:
            return call("speculative", "kda_verify", qkv.device, *x, *drafts, *rows, *rule, *outs, seen=seen)
        slots, columns = min(len(conv_state), len(ssm_state)), past - 1 + verify_slots.shape[1]
        states = (conv_state[:slots, :, :columns], ssm_state[:slots])
        return call("window", "kda_window", qkv.device, *x, *states, *rows, *rule, *outs, seen=seen)

    if commit_slots is not None:
        call("speculative", "kda_commit", qkv.device, *drafts, commit_slots, num_committed_tokens, seen=seen)
    kinds = [
        (batch.num_decodes, decode, batch.num_decodes, batch.decode_tokens, None),
        (batch.num_prefills, prefill, num_prefill_tokens, batch.prefill_tokens, prefill_query_start_loc),
        (batch.num_verifies, verify, num_verify_tokens, batch.verify_tokens, verify_query_start_loc),
    ]
    inputs, T = [qkv, raw_g, beta, out_gate], len(qkv)
    present, fresh = [kind for kind in kinds if kind[0]], out is None
    if len(present) == 1 and present[0][3] == slice(0, T) and not (fresh and full):
        return present[0][1](inputs, out)

    if fresh:
        out = torch.empty(out_gate.shape, dtype=qkv.dtype, device=qkv.device)
    if fresh or any(isinstance(where, Tensor) for *_, where, _ in present):
        places = [(n, where.start if isinstance(where, slice) else where, end) for _, _, n, where, end in kinds]
        gathered = call("tokens", "gather_tokens", qkv.device, inputs, places, out if fresh else None, seen=seen)
    row = 0
    for _, run, tokens, where, _ in present:
        if isinstance(where, Tensor):
            run([x[row : row + tokens] for x in gathered], out, where)
            row += tokens
        else:
            run([x[where] for x in inputs], out[where])
    return out


def _check(
    qkv, raw_g, beta, out_gate, conv_state, ssm_state, records, conv_weight, A_log, g_bias, norm_weight, conv_bias,
    lower_bound, activation, out, **fields,
) -> None:  # fmt: skip
    """All that the operations check, before the first of them writes."""
    batch = Batch.unchecked(fields)
    T = check_layer_tokens(
        qkv, raw_g, beta, out_gate, conv_state, ssm_state, conv_weight, A_log, g_bias, norm_weight, conv_bias, lower_bound,
        activation,
    )  # fmt: skip
    if T < batch.num_tokens:
        check.refuse("qkv", f"{T} tokens", f"{batch.num_tokens} or more, as many as the batch has")
    slots = min(len(conv_state), len(ssm_state))
    past = conv_weight.shape[1] - 1
    if batch.decode_slots is not None:
        check.slots("batch.decode_slots", batch.decode_slots, batch.num_decodes, slots, qkv)
    if batch.prefill_slots is not None:
        N = check.sequences(
            batch.prefill_query_start_loc, 1, batch.num_prefill_tokens, qkv, "batch.prefill_query_start_loc"
        )
        check.slots("batch.prefill_slots", batch.prefill_slots, N, slots, qkv)
        if batch.checkpoint_slots is not None:
            check.slots("batch.checkpoint_slots", batch.checkpoint_slots, len(batch.checkpoint_offsets), slots, qkv)
    if batch.verify_slots is not None:
        check.sequences(batch.verify_query_start_loc, 1, batch.num_verify_tokens, qkv, "batch.verify_query_start_loc")
        if batch.verify_slots.dim() == 2:
            check.slots("batch.verify_slots", batch.verify_slots, batch.num_verifies, slots, qkv, window=True)
            columns = past - 1 + batch.verify_slots.shape[1]
            if conv_state.shape[2] < columns:
                wanted = f"{columns} or more, for windows of {batch.verify_slots.shape[1]}"
                check.refuse("conv_state", f"{conv_state.shape[2]} columns", wanted)
        else:
            window = _check_drafts(
                conv_state, ssm_state, records, batch.verify_slots, batch.num_accepted_tokens, batch.num_verifies, past, qkv
            )
            if batch.window > window:
                check.refuse("records", f"a window of {window}", f"{batch.window} or more, as the batch has")
            if check.checking() and batch.num_verifies:
                longest = int(batch.verify_query_start_loc.diff().max())
                if longest > window:
                    accepted = f"{window} or fewer (KDA_CHECK)"
                    check.refuse("batch.verify_query_start_loc", f"a row of {longest} tokens", accepted)
    if batch.commit_slots is not None:
        counts = batch.num_committed_tokens
        _check_drafts(conv_state, ssm_state, records, batch.commit_slots, counts, len(counts), past, qkv)
    check.output(out, out_gate.shape, qkv.dtype, qkv)


def _check_drafts(conv_state, ssm_state, records, slots, counts, N: int, past: int, like: Tensor) -> int:
    """Returns the window of the records."""
    if records is None:
        check.refuse("records", "None", "a tensor, as rows of the batch have records")
    window = check_draft(conv_state, ssm_state, records, slots, counts, N, like)
    if conv_state.shape[2] < past + window:
        check.refuse("conv_state", f"{conv_state.shape[2]} columns", f"{past + window} or more, for windows of {window}")
    return window
