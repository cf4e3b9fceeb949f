"""FeT's attention beside torch's fused one: ratios of time, forward and backward, in one run.

    python research/fet/attention.py                     # CPU
    python research/fet/attention.py --device cuda

Both go in turns over the same weights and inputs, and medians are compared, on a CPU those of its
own time; 128 rows, K links, width 64, 4 heads. A bias that learns, by mask or ranks, is FeT's
default and the paper's; without gradients is what validation and predictions do. Outputs must
agree.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from securevfl.core.devices import Precision, computing_in
from securevfl.models.fet.attention import Attention

ROWS, WIDTH, HEADS = 128, 64, 4


class Fused(Attention):
    """The same by torch's kernel."""

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (self._by_head(one) for one in (query, key, value))
        if bias is not None:
            bias = bias[:, None, None, :].to(query.dtype)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def milliseconds(step: Callable[[], Tensor], device: torch.device) -> float:
    """Return how long a step takes: a GPU's by the clock, a CPU's without what others do on it."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    begun = clock()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (clock() - begun)


def compare(
    links: int,
    *,
    learns: bool,
    training: bool,
    precision: Precision,
    device: torch.device,
    times: int,
) -> str:
    """Return a line of the table."""
    torch.manual_seed(0)
    plain = Attention(WIDTH, heads=HEADS).to(device)
    fused = Fused(WIDTH, heads=HEADS).to(device)
    fused.load_state_dict(plain.state_dict())
    inputs = torch.randn(ROWS, links, WIDTH, device=device)
    bias = torch.randn(ROWS, links, device=device, requires_grad=learns)

    def step(model: Attention) -> Tensor:
        with torch.set_grad_enabled(training):
            with computing_in(precision, device):
                out = model.among(inputs, bias)
            if training:
                out.float().square().sum().backward()
        return out.detach().float()

    far = 1e-5 if precision == "float32" else 0.1
    torch.testing.assert_close(step(plain), step(fused), rtol=far, atol=far)
    taken: dict[Attention, list[float]] = {plain: [], fused: []}
    for _ in range(times):
        for model, found in taken.items():
            found.append(milliseconds(partial(step, model), device))
    ours, theirs = (statistics.median(found) for found in taken.values())
    kind = ("learns" if learns else "fixed") if training else "no gradients"
    return f"| {links} | {kind} | {precision} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", type=int, default=41)
    parser.add_argument("--links", type=int, nargs="+", default=[5, 20, 50, 100])
    options = parser.parse_args()
    print("| K | bias | precision | FeT's, ms | fused, ms | fused over FeT's |")
    print("| --- | --- | --- | --- | --- | --- |")
    for precision in get_args(Precision):
        for links in options.links:
            for training, learns in ((True, True), (True, False), (False, False)):
                print(
                    compare(
                        links,
                        learns=learns,
                        training=training,
                        precision=precision,
                        device=torch.device(options.device),
                        times=options.times,
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
