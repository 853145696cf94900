"""Speed of the GPU's summary kernel alone on tensors of several sizes, compared with a pass that only reads.

    python benchmarks/kernel_gpu.py

Times are those of the kernels in the profiler; the host's cost of a launch is measured separately.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from tensortap.frameworks.torch.cuda.reader import CudaReader

SHAPES = [(2048,), (2048, 2048), (4, 2048, 2048), (4, 2048, 5632), (4, 2048, 32000), (8, 4096, 16384)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'dtype':>10} {'MB':>8} {'summary':>18} {'read-only':>18} {'of it':>6}")
    for dtype in DTYPES:
        for shape in SHAPES:
            size, ours, reading = measure(shape, dtype)
            speeds = [f"{size / s / 1e12:5.2f} TB/s {s * 1e6:7.1f} µs" for s in (ours, reading)]
            name = str(dtype).removeprefix("torch.")
            print(f"{name:>10} {size / 1e6:8.1f} {speeds[0]:>18} {speeds[1]:>18} {reading / ours:6.0%}")
    print(f"host time of one submission: {submission() * 1e6:.1f} µs")


def measure(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, float, float]:
    """Return bytes, and median seconds of the kernel and of a reduction that reads the same memory."""
    elements = torch.Size(shape).numel()
    count = max(1, min(8, (1 << 30) // (2 * elements)))  # several, so that none is still in the cache
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(count)]
    device_reader = CudaReader()
    device_reader.submit(tensors[0])
    device_reader.end_step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(max(2, 16 // count)):
            for tensor in tensors:
                device_reader.submit(tensor)
        device_reader.end_step()
        for _ in range(max(2, 16 // count)):
            for tensor in tensors:
                tensor.view(torch.int32).amax()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {"summarize": [], "reduce_kernel": []}
    for event in seen.events():
        for name, spans in times.items():
            if event.device_type == torch.autograd.DeviceType.CUDA and name in event.name:
                spans.append(event.time_range.elapsed_us() / 1e6)
    nbytes = elements * tensors[0].element_size()
    return nbytes, statistics.median(times["summarize"]), statistics.median(times["reduce_kernel"])


def submission() -> float:
    """Return the host's time for one tensor, including the launch."""
    device_reader, small = CudaReader(), torch.ones(64, 2048, device="cuda", dtype=torch.bfloat16)
    spans = []
    for _ in range(6):
        started = time.perf_counter()
        tickets = [device_reader.submit(small) for _ in range(500)]
        spans.append((time.perf_counter() - started) / 500)
        device_reader.end_step()
        device_reader.collect(tickets)
    return min(spans)


if __name__ == "__main__":
    main()
