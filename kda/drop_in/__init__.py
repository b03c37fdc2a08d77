# SPDX-License-Identifier: Apache-2.0
"""KDA where people already work: names and shapes of other packages, no arithmetic. One module a package."""
