#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`python -m kda bench` in a clone, with the options of that command:

    PYTHONPATH=.:.peers python bench/gpu.py --out DIR [--part accuracy,prefill,layer,decode,speculation,ops] [--peers ...]

`.peers` holds public kernels to compare with (vLLM's Triton ones, FlashKDA, flash-linear-attention); what is not there is left
out. Without a GPU it runs on the CPU.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kda.cli import main  # noqa: E402

FORMER = {"--small": "--quick", "--all-rows": "--all-peers"}

if __name__ == "__main__":
    sys.exit(main(["bench", *(FORMER.get(word, word) for word in sys.argv[1:])]))
