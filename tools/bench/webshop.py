"""Cost of a large WebShop catalogue: indexing it once per node, the start of a process, its memory, and a search.

    python tools/bench/webshop.py DATA_DIR [products]

The catalogue repeats DATA_DIR's products under new ASINs (100,000 by default), so it has fewer words than as many real
products would. Each step runs in a process of its own, as in workers.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpc_es.envs.webshop import products

PROCESSES = 4
QUERIES = ("red cotton dress", "wireless noise cancelling headphones with long battery life", "usb c cable 6 feet")

OPENED = """
import json, resource, sys, time
began = time.monotonic()
from hpc_es import envs
env = envs.make("webshop", data_dir=sys.argv[1], cache_dir=sys.argv[2])
env.reset(0)
first = time.monotonic() - began
searches = []
for query in sys.argv[3:]:
    at = time.monotonic()
    env.catalogue.search(query)
    searches.append(time.monotonic() - at)
kib = {}
for line in open("/proc/self/smaps_rollup", encoding="utf-8"):
    name, _, value = line.partition(":")
    if name in ("Pss", "Rss", "Private_Dirty"):
        kib[name] = int(value.split()[0])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
facts = {"first": first, "searches": searches, "peak": peak, "goals": len(env.catalogue.goals)}
print(json.dumps({**facts, **kib}), flush=True)
sys.stdin.read()
"""


def main() -> None:
    source, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        data, cache = Path(folder, "data"), Path(folder, "cache")
        data.mkdir()
        multiply(products.find(source), count, data)
        size = (data / "items_shuffle.json").stat().st_size
        print(f"{count:,} products, {size / 2**20:,.0f} MiB of items")
        began = time.monotonic()
        with opened(data, cache) as maker:
            made = told(maker)
        seconds, peak = time.monotonic() - began, made["peak"] / 2**10
        kept = sum(path.stat().st_size for path in cache.rglob("*.npy")) / 2**20
        print(f"indexed once: {seconds:.0f} s, peak {peak:,.0f} MiB, on disk {kept:,.0f} MiB")
        together = [opened(data, cache) for _ in range(PROCESSES)]
        found = [told(process) for process in together]
        for process in together:
            process.kill()
            process.communicate()
    first = sorted(each["first"] for each in found)[PROCESSES // 2]
    search = sorted(seconds for each in found for seconds in each["searches"])
    print(f"{PROCESSES} processes at once, {found[0]['goals']:,} goals: first prompt after {first:.1f} s")
    print(f"a search: median {1e3 * search[len(search) // 2]:.1f} ms, longest {1e3 * search[-1]:.1f} ms")
    own = max(each["Private_Dirty"] for each in found) / 2**10
    share = max(each["Pss"] for each in found) / 2**10
    print(f"memory of each: {own:,.0f} MiB of its own, {share:,.0f} MiB with its share of what is mapped")


def multiply(files: products.Files, count: int, data: Path) -> None:
    items, instructions = _load(files.items), _load(files.instructions)
    texts = {}
    with (data / "items_shuffle.json").open("w", encoding="utf-8") as out:
        for number in range(count):
            item = items[number % len(items)]
            asin = f"X{number:09d}"
            if item["asin"] in instructions:
                texts[asin] = instructions[item["asin"]]
            out.write(("[" if number == 0 else ",\n") + json.dumps({**item, "asin": asin}))
        out.write("]")
    (data / "items_ins_v2.json").write_text(json.dumps(texts), encoding="utf-8")


def _load(path: Path) -> Any:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return json.load(file)


def opened(data: Path, cache: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", OPENED, str(data), str(cache), *QUERIES]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process ended early; its error stands above")
    found: dict[str, Any] = json.loads(line)
    return found


if __name__ == "__main__":
    main()
