#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""generate() of a small GLM-5.3 model in transformers, its KDA layers patched and not, on this CPU.

    python bench/transformers_generate.py --out DIR [--batch 1,8] [--prompt 512] [--new 32] [--dtype bfloat16]

Random weights; layers as GLM-5.3-Flash has them, three of KDA (heads of 128) and one of sparse attention in turn, a
mixture of experts behind each but the first three. The two models share their weights and take turns; medians. `prefill`
is the prompts up to the first new token, `decode` the tokens after it, both of the whole model; `layer` is one KDA layer
alone with the prompts, `step` with the next token. transformers runs its PyTorch code: flash-linear-attention is hidden from
it. Writes DIR/transformers_generate.json row by row.
"""
from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""

import argparse  # noqa: E402
import copy  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kda  # noqa: E402
from kda.cli.bench import measure  # noqa: E402
from kda.cli.bench.rows import Results, Row, machine  # noqa: E402
from kda.cli.check import err, in_pytorch  # noqa: E402
from kda.drop_in import transformers as drop_in  # noqa: E402

TEXT = dict(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_attention_heads=8,
    num_key_value_heads=8, n_routed_experts=8, num_experts_per_tok=2, kv_lora_rank=128, q_lora_rank=256, v_head_dim=64,
    qk_nope_head_dim=64, index_topk=256, index_head_dim=64, index_n_heads=4, linear_head_dim=128, linear_num_heads=16,
    pad_token_id=0,
)
VISION = dict(hidden_size=32, intermediate_size=32, depth=1, num_heads=2, out_hidden_size=512, projection_intermediate_size=32)


def models(layers: int, dtype: torch.dtype) -> dict[str, nn.Module]:
    with in_pytorch():
        from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = Glm5NextConfig(text_config=dict(TEXT, num_hidden_layers=layers), vision_config=VISION, dtype=dtype)
    theirs = Glm5NextForConditionalGeneration._from_config(config).eval()
    ours = copy.deepcopy(theirs)
    for mine, weight in zip(ours.parameters(), theirs.parameters()):
        mine.data = weight.data
    drop_in.patch(ours)
    return {"kda": ours, "transformers": theirs}


class Clock:
    """As generate()'s `streamer`: told of the prompts first, then of every new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(1e3 * time.perf_counter())

    def end(self) -> None:
        pass


def generate_ms(model: nn.Module, ids: Tensor, new: int) -> tuple[float, float]:
    """Until the first new token, and from there to the last."""
    clock = Clock()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, max_new_tokens=new, streamer=clock
    )
    return clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1]


def steps(layers: dict[str, nn.Module], config, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The layers' next token after the prompts x [batch, T, hidden], over and over."""
    from transformers.cache_utils import DynamicCache

    def step(layer: nn.Module) -> Callable[[], Tensor]:
        cache, token = DynamicCache(config=config), x[:, :1].clone()
        layer(x, cache=cache)
        return lambda: layer(token, cache=cache)

    return {name: step(layer) for name, layer in layers.items()}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--runs", type=int, default=5)
    opts = parser.parse_args()

    pair = models(opts.layers, getattr(torch, opts.dtype))
    about = machine() | dict(
        kind="cpu", command=" ".join(sys.argv), threads=torch.get_num_threads(), backend=kda.backend_for("cpu"), text=TEXT,
        layers=opts.layers, dtype=opts.dtype, prompt=opts.prompt, new=opts.new,
        parameters=sum(p.numel() for p in pair["kda"].parameters()),
    )  # fmt: skip
    results = Results(opts.out, about, (), fresh=True, file="transformers_generate.json")
    print(f"{about['cpu']}, {torch.get_num_threads()} threads; {kda.why('cpu')}", flush=True)

    def add(part: str, batch: int, tokens: int, ms: dict[str, dict[str, float]]) -> None:
        results.add(Row(part, f"batch {batch}", dict(N=batch, T=tokens), ms))
        for name, t in ms.items():
            rate, ratio = tokens / t["ms"] * 1e3, ms["transformers"]["ms"] / t["ms"]
            print(f"{part:8} batch {batch:2}: {name:13} {t['ms']:9.1f} ms {rate:10,.0f} tokens/s {ratio:6.2f}x transformers",
                  flush=True)  # fmt: skip

    def in_turn(calls: dict[str, Callable[[], Tensor]], runs: int) -> dict[str, dict[str, float]]:
        """Spreads of calls that take turns."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for run in range(runs + 1):
            for name, call in calls.items():
                begin = time.perf_counter()
                call()
                if run > 0:  # the first one warms up
                    samples[name].append(1e3 * (time.perf_counter() - begin))
        return {name: measure.spread(ts) for name, ts in samples.items()}

    ids = torch.randint(1, TEXT["vocab_size"], (2, min(opts.prompt, 128)))
    exact = {name: copy.deepcopy(model).float() for name, model in pair.items()}
    difference = err(*(model(ids).logits for model in exact.values()))
    print(f"in fp32 the logits of the two differ by {difference:.1e}", flush=True)
    results.about["difference"] = difference
    del exact
    for batch in opts.batch:
        ids = torch.randint(1, TEXT["vocab_size"], (batch, opts.prompt))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in pair}
        for run in range(opts.runs + 1):
            for name, model in pair.items():
                measured = generate_ms(model, ids, opts.new)
                if run > 0:  # the first one warms up
                    times[name].append(measured)
        first, rest = ({name: measure.spread([t[i] for t in ts]) for name, ts in times.items()} for i in (0, 1))
        add("prefill", batch, batch * opts.prompt, first)
        add("decode", batch, batch * (opts.new - 1), rest)
        x = torch.randn(batch, opts.prompt, TEXT["hidden_size"], dtype=pair["kda"].dtype)
        layers = {name: model.model.language_model.layers[0].self_attn for name, model in pair.items()}
        whole = {name: (lambda layer=layer: layer(x)) for name, layer in layers.items()}
        add("layer", batch, batch * opts.prompt, in_turn(whole, opts.runs))
        config = pair["kda"].config.get_text_config()
        add("step", batch, batch, in_turn(steps(layers, config, x), 20 * opts.runs))
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
