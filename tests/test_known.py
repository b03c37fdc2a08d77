# SPDX-License-Identifier: Apache-2.0
"""Calls that are taken for one seen before: those alike in all but the tensors' contents and addresses, and no others."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kda import known

X = torch.randn(6, 4, 8)
ARGS = [  # of one operation: three places, whatever they hold
    (X, None, 1.0),
    (torch.ones(6, 4, 8), None, 1.0),  # as before
    (X[1:].clone(), None, 1.0),
    (X[:, ::2], None, 1.0),
    (X[:, :2].clone(), None, 1.0),  # the same shape, other strides
    (X.mT.contiguous().mT, None, 1.0),
    (X.bfloat16(), None, 1.0),
    (X.half(), None, 1.0),
    (X.to("meta"), None, 1.0),
    (X, None, 2.0),
    (X, None, "1.0"),
    (X, 1.0, None),
    (X, X, 1.0),
    (None, X, 1.0),
    (X, 1.0, X),
    (X, None, torch.tensor(1.0)),  # a tensor where others have a number it equals
    (X, torch.tensor(1.0), None),
    (torch.nn.Parameter(X), None, 1.0),  # alike, though torch.compile would tell them apart
    (X.clone().requires_grad_(), None, 1.0),
    (X[:1], None, 1.0),
    (X[:1].as_strided((1, 4, 8), (99, 8, 1)), None, 1.0),  # no dim of more than one entry has another stride
    (X[0], None, 1.0),
    (X[..., 0], None, 1.0),
    (None, None, None),
    (1.0, None, 2.0),
]  # fmt: skip
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def written_out(args):
    return tuple(
        ("tensor", str(x.dtype), tuple(x.size()), x.stride(), str(x.device)) if isinstance(x, torch.Tensor) else x for x in args
    )


@pytest.mark.parametrize("guards", [True, False])
@settings(deadline=None, max_examples=200)
@given(calls=st.lists(st.tuples(st.integers(0, len(ARGS) - 1), st.sampled_from(MODES), st.integers(1, 3)), max_size=40))
def test_calls_alike_and_no_others_share_an_entry(guards, calls):
    """In whatever order and as often as they come, and whether or not a torch has the guards of torch.compile."""
    called, wanted = known.Known(), {}
    with pytest.MonkeyPatch.context() as patch:
        if not guards:
            patch.setattr(known, "TensorGuards", None)
        for which, mode, times in calls:
            args, key = list(ARGS[which]), written_out(ARGS[which])
            for _ in range(times):
                with mode():
                    found, tensors = called.find(args)
                assert found is wanted.setdefault(key, found)
                assert [id(x) for x in tensors] == [id(x) for x in args if isinstance(x, torch.Tensor)]
    assert len({id(found) for found in wanted.values()}) == len(wanted)


def test_the_guards_are_there():
    """Without them calls are found, too, but by something slower."""
    called = known.Known()
    first = [called.find(ARGS[0])[0] for _ in range(2)][0]
    called.all.clear()
    assert called.find(ARGS[1])[0] is first
    assert called.find(ARGS[2])[0] is not first


@pytest.mark.parametrize("odd", [[1, 2], {}, np.ones(3), np.float32(1.0)], ids=repr)
def test_arguments_that_no_check_accepts(odd):
    called = known.Known()
    for _ in range(3):
        for args in ((X, None, odd), (X, odd, 1.0), (odd, None, 1.0), (X, None, 1.0)):
            found, tensors = called.find(args)
            assert len(tensors) == sum(isinstance(x, torch.Tensor) for x in args) and not found.checked
    assert called.find((X, None, 1.0))[0] is called.find((X, None, 1.0))[0]


def test_what_was_seen_does_not_pile_up():
    called = known.Known()
    for n in range(3 * known.MOST_SEEN):
        for _ in range(2):
            called.find((X, None, n))
    assert len(called.all) <= known.MOST_SEEN and len(called.recent) <= known.RECENT
