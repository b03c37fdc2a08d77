# SPDX-License-Identifier: Apache-2.0
"""Gate: raw projection -> log decay per key channel (contract section 2; Kimi Linear, arXiv 2510.26692)."""

from kda.reference._common import log_decay


def fused_kda_gate(g, A_log, g_bias, beta, threshold, lower_bound):
    """Log decay y, fp32 [B, T, HV, K] contiguous.

    g [B, T, HV, K]; A_log [HV]; g_bias [HV, K] or None.
    lower_bound a float: `y = lower_bound * sigmoid(exp(A_log) * (g + g_bias))`;
    None: `y = -exp(A_log) * softplus(g + g_bias, beta, threshold)`.
    """
    return log_decay(g, A_log[:, None], g_bias, lower_bound, beta, threshold).contiguous()
