# SPDX-License-Identifier: Apache-2.0
"""The pure PyTorch backend, for CPU and GPU: the executable specification.

One module a stage, with the names and signatures that the other backends have. Arguments arrive validated and
normalised (`kda.ops` does that), arithmetic is fp32, and indices that live on a device may be read on the
host.
"""
