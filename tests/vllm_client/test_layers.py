# SPDX-License-Identifier: Apache-2.0
"""vLLM's KDA layers on the CPU equal the oracle in every kind of step, through vLLM's own metadata builder."""

import pytest
from client import LAYERS, Client, Row
from helpers import BF16, FP32, dtype_id

pytestmark = [
    pytest.mark.parametrize("name", LAYERS), pytest.mark.parametrize("dtype", [FP32, BF16], ids=dtype_id),
    # vLLM's packed weights free themselves with torch operations, which fails where torch.compile is tracing
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_prefill_and_decode(backend, name, dtype):
    client = Client(name, dtype)
    m = client.step(Row(0, 33), Row(1, 15))
    assert (m.num_prefills, m.num_decodes) == (2, 0)
    for _ in range(3):
        m = client.step(Row(0, 1), Row(1, 1))
        assert (m.num_prefills, m.num_decodes) == (0, 2)
    assert client.check() == 33 + 15 + 2 * 3


def test_decodes_beside_a_prompt_in_pieces(backend, name, dtype):
    client = Client(name, dtype)
    client.step(Row(0, 5))
    m = client.step(Row(0, 1), Row(1, 20))
    assert (m.num_prefills, m.num_decodes) == (1, 1)
    client.step(Row(0, 1), Row(1, 45))  # goes on from the state of its first piece
    client.step(Row(0, 1), Row(1, 1), Row(2, 70))
    client.step(Row(0, 1), Row(1, 1), Row(2, 1))
    assert client.check() == 9 + 67 + 71


def test_speculative_windows(backend, name, dtype):
    client = Client(name, dtype, drafts=3)
    client.step(Row(0, 9), Row(1, 17))
    m = client.step(Row(0, 4, accepted=1), Row(1, 4, accepted=1))
    assert (m.num_spec_decodes, m.num_prefills) == (2, 0)
    client.step(Row(0, 4, accepted=4), Row(1, 4, accepted=1))  # all of the one, none of the other's draft
    client.step(Row(0, 4, accepted=2), Row(1, 4, accepted=3))
    assert client.check() == (9 + 4 + 2 + 4) + (17 + 1 + 3 + 4)


def test_speculative_windows_beside_a_prompt(backend, name, dtype):
    client = Client(name, dtype, drafts=3)
    client.step(Row(0, 9), Row(1, 17))
    m = client.step(Row(0, 4, accepted=1), Row(2, 30), Row(1, 4, accepted=1))
    assert (m.num_spec_decodes, m.num_prefills) == (2, 1)
    client.step(Row(1, 4, accepted=2), Row(0, 4, accepted=3), Row(2, 4, accepted=1))
    assert client.check() == (9 + 3 + 4) + (17 + 2 + 4) + (30 + 4)
