"""How long a worker that joins a running run waits for theta: by broadcast, and from a checkpoint and commits.

    python tools/bench/join.py [--mib 128] [--joiners 2] [--commits 1] [--population 30] [--json]

A head and its joiners, each a process with an arena of `--mib` MiB, over loopback and Gloo. "theta by broadcast" is
what `transport.join: broadcast` does: one transfer for all joiners, from the call to the last compared digest. "usual":
each joiner reads the newest checkpoint (from the page cache, so the best case of a shared file system) and applies
`--commits` commits of `--population` members, all joiners at once. "limit": as many bytes from one process to each of
the others over plain TCP sockets, between allocated memory, without a digest. "buckets alone" is the part of the
transfer that moves bytes, compared with the same limit.

The row of memory shows this machine's copy rate with one thread: each byte of a transfer is copied into the kernel, out
of it, and from the bucket into the arena, and the digest reads it once more.
"""

import multiprocessing
import socket
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from harness import Row, alternate, arguments, show

from hpc_es.noise import threads
from hpc_es.params import checkpoint
from hpc_es.params.arena import Arena
from hpc_es.params.rebuild import receive
from hpc_es.params.weights import Spec, write
from hpc_es.paths import RunPaths
from hpc_es.records import Commit, Consumed, EvalId, Seeds, Term
from hpc_es.transport.collective import HeadCollective
from hpc_es.transport.messages import OpenTransfer
from hpc_es.transport.transfer import Receiving

HOST, TIMEOUT_S, ROUNDS = "127.0.0.1", 30.0, 3
VERSION = 7
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "hpc_es.transport.collective", "hpc_es.params.arena"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=128, help="size of theta in float32, in MiB")
    parser.add_argument("--joiners", type=int, default=2)
    parser.add_argument("--commits", type=int, default=1, help="number of commits since the newest checkpoint")
    parser.add_argument("--population", type=int, default=30, help="members per commit, N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), options.mib * 2**18, options.joiners)
        commits = [commit(VERSION + 1 + k, options.population) for k in range(options.commits)]
        try:
            ways: dict[str, Callable[[], object]] = {
                "broadcast": bench.broadcast,
                "checkpoint": partial(bench.from_checkpoint, commits),
                "sockets": bench.sockets,
                "copy": bench.copy,
            }
            seconds = alternate(ways, ROUNDS)
        finally:
            bench.close()
    num_bytes, to = options.mib * 2**20, f"to {options.joiners} joiners"
    rate = {way: num_bytes / took / 1e6 for way, took in seconds.items()}
    usual = f"usual: a checkpoint from the page cache, commits after it: {options.commits}, N={options.population}"
    limit = f"limit: plain sockets {to}"
    buckets = num_bytes / float(np.median(bench.buckets_s)) / 1e6
    show(
        "join",
        [
            Row(
                f"theta of {options.mib} MiB {to}, compared",
                "s",
                ours=seconds["broadcast"],
                usual=seconds["checkpoint"],
                limit=seconds["sockets"],
                note=f"{usual}; {limit}",
            ),
            Row("bytes into each joiner, compared", "MB/s", rate["broadcast"], rate["checkpoint"], rate["sockets"]),
            Row("buckets alone, into each joiner", "MB/s", buckets, limit=rate["sockets"], note=limit),
            Row("memory copied by one thread", "MB/s", ours=rate["copy"]),
        ],
        as_json=options.json,
    )


class Bench:
    """A head with an arena, its joiners, and a checkpoint of theta_VERSION."""

    def __init__(self, folder: Path, num_parameters: int, num_joiners: int) -> None:
        model = write_model(folder / "model", num_parameters)
        threads.start(1)
        self.arena = Arena.from_pretrained(model)
        self.arena.version = VERSION
        self.digest = self.arena.digest()
        self.folder = checkpoint.write(RunPaths(folder), self.arena)
        self.collective = HeadCollective(HOST, TIMEOUT_S, lambda event: None)
        self.memory = self.arena.memory.data.cast("B")
        self._copy = bytearray(len(self.memory))
        self.buckets_s: list[float] = []
        self._num_transfers = 0
        self.joiners = [Joiner(model) for _ in range(num_joiners)]
        for joiner in self.joiners:
            joiner.answer()

    def close(self) -> None:
        for joiner in self.joiners:
            joiner.end()
        self.collective.close()

    def broadcast(self) -> None:
        self._num_transfers += 1
        names = [str(place) for place in range(len(self.joiners))]
        sending = self.collective.sending(self._num_transfers, names, "gloo")
        calls = sending.calls(VERSION, self.digest, len(self.memory)).values()
        for joiner, call in zip(self.joiners, calls, strict=True):
            joiner.start("take", call)
        self.buckets_s.append(sending.send(self.memory).seconds)
        self._await_joiners()

    def from_checkpoint(self, commits: Sequence[Commit]) -> None:
        for joiner in self.joiners:
            joiner.start("catch_up", self.folder, commits)
        self._await_joiners()

    def sockets(self) -> None:
        """Send the whole memory to every joiner, with a thread each."""
        with socket.create_server((HOST, 0)) as server:
            for joiner in self.joiners:
                joiner.start("read", server.getsockname()[1])
            ends = [server.accept()[0] for _ in self.joiners]
            sends = [Thread(target=end.sendall, args=(self.memory,)) for end in ends]
            for send in sends:
                send.start()
            for send in sends:
                send.join()
            self._await_joiners()
            for end in ends:
                end.close()

    def copy(self) -> None:
        memoryview(self._copy)[:] = self.memory

    def _await_joiners(self) -> None:
        for joiner in self.joiners:
            joiner.answer()


class Joiner:
    """A process with an arena of its own."""

    def __init__(self, model: Path) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=serve, args=(theirs, model), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def answer(self) -> None:
        """Wait for the result. Errors: those of the process."""
        error = self.pipe.recv()
        if error is not None:
            raise error

    def end(self) -> None:
        self.start("end")
        self.process.join(10)


def serve(pipe: Connection, model: Path) -> None:
    threads.start(1)
    arena = Arena.from_pretrained(model)
    pipe.send(None)
    while True:
        method, arguments = pipe.recv()
        if method == "end":
            return
        try:
            METHODS[method](arena, *arguments)
        except Exception as error:  # sent to the head, which ends
            pipe.send(error)
        else:
            pipe.send(None)


def take(arena: Arena, call: OpenTransfer) -> None:
    receive(arena, call.version, call.digest, Receiving(call, timeout_s=TIMEOUT_S))


def catch_up(arena: Arena, folder: Path, commits: Sequence[Commit]) -> None:
    arena.reload(folder)
    arena.apply(commits)


def read(arena: Arena, port: int) -> None:
    memory, filled = arena.memory.data.cast("B"), 0
    with socket.create_connection((HOST, port)) as connection:
        while filled < len(memory):
            filled += connection.recv_into(memory[filled:])


METHODS: dict[str, Callable[..., None]] = {"take": take, "catch_up": catch_up, "read": read}


def commit(version: int, population: int) -> Commit:
    rng = np.random.default_rng(version)
    seeds, factors = rng.integers(2**63, size=population), rng.normal(scale=1e-5, size=population).astype(np.float32)
    consumed = tuple(Consumed(EvalId(version - 1, slot), 0.0) for slot in range(population))
    pairs = zip(seeds, factors, strict=True)
    terms = tuple(Term(int(seed), 1, 1e-3, 0, 0.0, float(factor)) for seed, factor in pairs)
    return Commit(version, consumed, Seeds(5e-4, terms))


def write_model(folder: Path, num_parameters: int) -> Path:
    """Write a model of sixteen random tensors."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    rng, each = np.random.default_rng(0), num_parameters // 16
    specs = [Spec(f"layers.{number:02}.weight", "F32", (each,)) for number in range(16)]
    write(folder / "model.safetensors", specs, lambda name: rng.standard_normal(each, np.float32))
    return folder


if __name__ == "__main__":
    main()
