# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels, one file a stage, the same names as in `kda.reference`."""
