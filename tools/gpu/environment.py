"""The machine: what is installed, what the GPU is, and how fast memory is copied on it and to and from it."""

import os
import platform
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch
from findings import Findings, arguments, begin
from outcomes import A_GPU

PACKAGES = ("torch", "triton", "numpy", "numba", "msgspec", "pydantic", "pyzmq", "safetensors", "transformers", "vllm")


def main() -> None:
    findings = begin(arguments(__doc__).parse_args())
    facts(findings)
    findings.check(A_GPU, torch.cuda.is_available() or not findings.on_gpu, "looked for by torch")
    if findings.on_gpu and torch.cuda.is_available():
        gpu(findings)
    if not findings.on_gpu or torch.cuda.is_available():
        with findings.step("bandwidths"):
            bandwidths(findings)


def facts(findings: Findings) -> None:
    findings.fact("Python", f"{platform.python_version()} on {platform.platform()}")
    findings.fact("packages", ", ".join(f"{name} {installed(name)}" for name in PACKAGES))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    findings.fact("CPUs", f"{len(os.sched_getaffinity(0))}, {memory / 2**30:.0f} GiB of memory")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    findings.fact("locked memory", "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB")


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def gpu(findings: Findings) -> None:
    about = torch.cuda.get_device_properties(findings.device)
    findings.fact("GPUs", f"{torch.cuda.device_count()}; the first: {about.name}, {about.total_memory / 2**30:.1f} GiB")
    findings.fact("CUDA", f"{torch.version.cuda}, compute capability {about.major}.{about.minor}")
    with findings.step("NCCL"):
        findings.fact("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    if shutil.which("nvidia-smi") is None:
        findings.not_run("driver, clocks, power", "there is no nvidia-smi")
        return
    with findings.step("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        findings.fact("driver, clocks, power", "; ".join(said.splitlines()))


def bandwidths(findings: Findings) -> None:
    """One GiB at a time; both directions at once on two streams."""
    findings.measured("copy on the device", findings.copy_bandwidth() / 1e9, "GB/s, read and written")
    count = 2**28 if findings.on_gpu else 2**12
    pageable = torch.randn(count)
    pinned = pageable.pin_memory() if findings.on_gpu else pageable.clone()
    there, back = torch.empty(count, device=findings.device), torch.empty(count, device=findings.device)
    for name, host in (("pinned", pinned), ("pageable", pageable)):
        seconds = findings.seconds(lambda host=host: there.copy_(host, non_blocking=True))
        findings.measured(f"host to device, {name}", host.nbytes / seconds / 1e9, "GB/s")
        seconds = findings.seconds(lambda host=host: host.copy_(back, non_blocking=True))
        findings.measured(f"device to host, {name}", host.nbytes / seconds / 1e9, "GB/s")
    if findings.on_gpu:
        other, stream = torch.empty(count).pin_memory(), torch.cuda.Stream()

        def both() -> None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                other.copy_(back, non_blocking=True)
            there.copy_(pinned, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)

        seconds = findings.seconds(both)
        findings.measured("both directions at once, pinned", pinned.nbytes / seconds / 1e9, "GB/s each")


if __name__ == "__main__":
    main()
