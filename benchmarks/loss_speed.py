"""How fast is MR2Loss, against the per-class loops of ``loop_reference.py`` and within a whole training step?

    python benchmarks/loss_speed.py

Forward and backward of both losses take turns on the same batches in the same process, after their values were found
equal to 1e-5; a training step is a ResNet-18 on 32×32 images with either loss. Ends with one line of JSON, ``name``,
``ratios``, ``bars`` and ``ok``, and with exit status 1 if a ratio misses its bar. On a GPU it also checks that the loss
never makes the host wait and can be captured in a CUDA graph.
"""

import copy
import json
import statistics
import sys
import time

import torch
from loop_reference import LoopMR2

from mr2_core import MR2Loss
from mr2_core.methods import build_method
from mr2_core.models import build_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEEDUPS = {(100, 128, 640): 8.0, (1000, 512, 2048): 3.0, (100, 512, 512): 3.0}  # (K, B, D): at least
STEP = 1.03 if DEVICE.type == "cuda" else 1.05  # at most


def seconds(work) -> float:
    """Wall time of one call, the GPU's work included."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def batch(num_classes, size, width):
    """Logits, features and labels; features short enough that the reference's exp does not overflow."""
    logits = torch.randn(size, num_classes, device=DEVICE, requires_grad=True)
    features = (torch.randn(size, width, device=DEVICE) / width**0.5).requires_grad_()
    return logits, features, torch.randint(num_classes, (size,), device=DEVICE)


def step(loss, logits, features, labels):
    """Forward and backward; returns the three losses and both gradients."""
    logits.grad = features.grad = None
    losses = loss(logits, features, labels)
    losses[0].backward()
    return [*(value.detach() for value in losses), logits.grad, features.grad]


def speedup(num_classes, size, width, rounds=8, calls=6):
    """Median time of the loops over that of MR2Loss, in turns of a few calls each."""
    losses = MR2Loss.paper(num_classes, width).to(DEVICE), LoopMR2(num_classes, width).to(DEVICE)
    for _ in range(3):  # also warms up
        inputs = batch(num_classes, size, width)
        ours, loops = (step(loss, *inputs) for loss in losses)
        for new, old in zip(ours, loops, strict=True):
            torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5 * old.abs().max().item())
    times = [], []
    for _ in range(rounds):
        inputs = [batch(num_classes, size, width) for _ in range(calls)]
        for loss, taken in zip(losses, times, strict=True):
            step(loss, *inputs[0])
            taken += [seconds(lambda loss=loss, one=one: step(loss, *one)) for one in inputs]
    ours, loops = map(statistics.median, times)
    print(
        f"K, B, D = {num_classes}, {size}, {width}: {1e3 * ours:.2f} ms, "
        f"loops {1e3 * loops:.2f} ms: {loops / ours:.1f} ×"
    )
    return loops / ours


def training_step(steps=6 if DEVICE.type == "cpu" else 60):
    """Median over pairs of the time of an MR2 step over that of an ERM step, the two taking turns at going first."""
    model = build_model("resnet18", 100).to(DEVICE, memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(128, 3, 32, 32, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(100, (128,), device=DEVICE)
    methods = {name: build_method(name, 100, 512).to(DEVICE) for name in ("erm", "mr2")}

    def work(name):
        optimiser.zero_grad()
        methods[name](*model(images), labels).total.backward()
        optimiser.step()

    times = {"erm": [], "mr2": []}
    for turn in range(steps + 1):
        for name in ("erm", "mr2") if turn % 2 else ("mr2", "erm"):
            times[name].append(seconds(lambda name=name: work(name)))
    pairs = sorted(mr2 / erm for mr2, erm in zip(times["mr2"][1:], times["erm"][1:], strict=True))
    ratio = statistics.median(pairs)
    print(
        f"ResNet-18, B = 128: an ERM step {1e3 * statistics.median(times['erm'][1:]):.0f} ms, "
        f"an MR2 step {ratio:.3f} of it ({pairs[0]:.3f} … {pairs[-1]:.3f} over {steps} pairs)"
    )
    return ratio


def never_waits():
    """Whether the loss runs without synchronising the host and can be captured in a CUDA graph."""
    loss, inputs = MR2Loss(100, 512).to(DEVICE), batch(100, 128, 512)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step(loss, *inputs)
    torch.cuda.current_stream().wait_stream(warm)
    eager = copy.deepcopy(loss)
    torch.cuda.set_sync_debug_mode("error")
    expected = [value.clone() for value in step(eager, *inputs)]
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(loss, *inputs)
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-6)
    print("No synchronisation; captured in a CUDA graph")


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {DEVICE.type}, {torch.get_num_threads()} threads")
    if DEVICE.type == "cuda":
        never_waits()
    ratios = {f"loops/ours at {shape}": speedup(*shape) for shape in SPEEDUPS}
    bars = {f"loops/ours at {shape}": f">= {bar}" for shape, bar in SPEEDUPS.items()}
    ok = all(ratio >= bar for ratio, bar in zip(ratios.values(), SPEEDUPS.values(), strict=True))
    ratios["MR2/ERM step"], bars["MR2/ERM step"] = training_step(), f"<= {STEP}"
    ok = ok and ratios["MR2/ERM step"] <= STEP
    print(
        json.dumps(
            {"name": "loss_speed", "ratios": {k: round(r, 3) for k, r in ratios.items()}, "bars": bars, "ok": ok}
        )
    )
    sys.exit(not ok)
