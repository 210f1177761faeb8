"""Every setting of a run, with its unit, its default and its bounds.

Pydantic models; unknown keys are refused (explain.py adds the suggestion). Names are the field's terms; where a
default comes from a paper, the source is named.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from hpc_es.config.es import EsConfig, StalenessConfig, Sync, Tail
from hpc_es.config.fields import Model, Seconds, file_name

MAX_REPEATS = 1024
"""Most repeats of a task in one evaluation: all of them are planned at once."""


class RunConfig(Model):
    name: Annotated[str, AfterValidator(file_name)]
    """Name of the run and of its folder below `dir`."""
    dir: Path = Path("runs")
    """Directory that holds run folders, relative to the working directory."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the run: member seeds, task batches and sampling seeds derive from it."""
    num_updates: int = Field(ge=1, lt=10**8)
    """Number of updates of the parameters."""
    group_readable: bool = False
    """Whether the owner's group may read the run folder, except its keys. Off: only the owner may read it."""
    max_failures_in_a_row: int = Field(24, ge=1)
    """Number of evaluations that may fail in a row in live workers before the run stops with the error."""


class ModelConfig(Model):
    path: str
    """Local Hugging Face folder: config, tokenizer, safetensors. Relative to the working directory. For an endpoint,
    the model's name there."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type in which the engine computes; theta itself is always float32."""
    include: tuple[str, ...] = ("*",)
    """Patterns (fnmatch) of canonical tensor names that are trained."""
    exclude: tuple[str, ...] = ()
    """Patterns (fnmatch) of tensor names that are not trained, even if `include` matches them. Tensors for multi-token
    prediction, `mtp.*`, are never trained, because no engine computes with them."""


class SamplingConfig(Model):
    """How the engine samples answers."""

    temperature: float = Field(0.0, ge=0, le=2)
    """Divisor of the logits. 0: greedy decoding."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities add up to this value. 1: no limit."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens to sample from. 0: no limit."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Value subtracted from the logits of tokens that the answer already contains."""
    max_tokens: int = Field(64, ge=1)
    """Maximum number of new tokens per turn."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; the answer does not include them."""
    choice_score: Literal["mean", "sum"] = "mean"
    """How choices of several tokens are ranked: by the mean or the sum of their tokens' log-probabilities. The mean
    does not favour short choices; with the sum, `go` always beats `go north`."""


class TaskConfig(Model):
    env: str
    """Environment: a built-in name (see `hpc-es env list`), or package.module:Class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, for training and evaluation alike."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Options for training only; they override `options`."""
    step_timeout: Seconds = 60.0
    """Time limit of one reset or step of an environment."""
    episode_timeout: Seconds = 3600.0
    """Time limit of one episode, checked between turns. An episode that exceeds it is scored as it stands."""
    chat: bool = True
    """Whether prompts use the model's chat template. Off: the texts of the messages, joined by line breaks."""
    chat_options: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, e.g. enable_thinking: false."""


class EvalConfig(Model):
    """Periodic evaluation of the unperturbed policy on a fixed set of tasks."""

    every: int = Field(10, ge=0)
    """Number of updates between two evaluations; theta_0 and the final theta always get one. 0: only these two."""
    num_tasks: int = Field(64, ge=0)
    """Number of held-out tasks per evaluation. 0: no evaluation."""
    batch: int | None = Field(None, ge=1)
    """Number of tasks in one batch of an evaluation. Default: es.tasks_per_member."""
    repeats: int = Field(1, ge=1, le=MAX_REPEATS)
    """Number of times each task is played, each time with different sampling seeds. Useless with greedy decoding."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options for evaluation only; they override `task.options`."""


def _base_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole or re.search(r"\s", value):
        raise ValueError("must be a base URL with http:// or https://, e.g. http://localhost:8000/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:
        # may hold a secret, so the value is not shown
        raise ValueError("a base URL without user, query and fragment is wanted; a key belongs into engine.api_key_env")
    return value.rstrip("/")


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        # likely the key itself, so the value is not shown
        raise ValueError("the name of an environment variable is wanted, like OPENAI_API_KEY, never the key itself")
    return value


class EngineConfig(Model):
    kind: Literal["vllm", "transformers", "lab", "endpoint"] = "vllm"
    """Inference engine. lab: tiny models of the ES laboratory, with which schedules can be studied in seconds.
    endpoint: a server with OpenAI's chat API, as a frozen baseline; model.path is the model's name there."""
    url: Annotated[str, AfterValidator(_base_url)] | None = None
    """Base URL of an endpoint, e.g. http://localhost:8000/v1."""
    api_key_env: Annotated[str, AfterValidator(_variable)] = "OPENAI_API_KEY"
    """Environment variable that holds the endpoint's key. If it is not set, no key is sent."""
    request_timeout: Seconds = 600.0
    """Time limit for one answer of an endpoint; after it, the request is sent again."""
    max_concurrent: int = Field(64, ge=1)
    """Maximum number of episodes played at the same time. 1 with temperature 0 and float32 makes generation
    independent of batch composition."""
    max_model_len: int = Field(2048, ge=16)
    """Maximum number of tokens of prompt and answer together."""
    kv_cache_mib: int | None = Field(None, ge=16)
    """Device memory for the KV cache, in MiB. Default: what vLLM finds (GPU), 256 MiB (CPU)."""
    prefix_cache: bool = True
    """Whether vLLM caches prefixes within one member. The cache is reset between members, and the reset is checked."""
    block_size: int | None = Field(None, ge=1)
    """Tokens per KV block. Default: that of vLLM."""
    enforce_eager: bool = True
    """Run vLLM without CUDA graphs and compilation: it starts sooner and decodes more slowly."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of GPUs per worker; its ranks share one copy of theta. Must divide the model's attention heads."""
    base: Literal["auto", "host", "device"] = "auto"
    """Where a worker on a GPU keeps theta, in float32: in pinned host memory, from which every member streams it to the
    device, or on the device. auto: on the device where there is room. On a CPU there is only the host."""
    direct_map: bool = True
    """Write members straight into vLLM's fused and sharded tensors, where that is proven to equal the model's own
    load_weights; off: always through load_weights."""
    threads: int | None = Field(None, ge=1)
    """CPU threads per worker; default: the cores of this machine divided by the workers on it."""
    probe_every: int = Field(10, ge=0)
    """Number of commits between two comparisons of the engine's live weights with the arena. 0: only at the start."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs; of an endpoint, fields laid over the body of every request, null to
    leave one out: {max_tokens: null, max_completion_tokens: 4096}."""

    @model_validator(mode="after")
    def _only_vllm_has_ranks(self) -> "EngineConfig":
        if self.tensor_parallel > 1 and self.kind != "vllm":
            raise ValueError(
                f"engine.tensor_parallel={self.tensor_parallel} is for engine.kind=vllm, not for {self.kind}: set that "
                "kind, or engine.tensor_parallel=1"
            )
        return self

    @model_validator(mode="after")
    def _only_endpoints_have_a_url(self) -> "EngineConfig":
        if self.kind == "endpoint" and self.url is None:
            raise ValueError(
                "engine.url is missing: engine.kind=endpoint needs the server's base URL, e.g. http://localhost:8000/v1"
            )
        if self.kind != "endpoint" and self.url is not None:
            raise ValueError(
                f"engine.url={self.url} is for engine.kind=endpoint, not for {self.kind}: set that kind, or no URL"
            )
        return self


class HeadConfig(Model):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that updates theta: a GPU, through which the arena is streamed, or all CPU cores. auto: a GPU if there is
    one."""


class TransportConfig(Model):
    backend: Literal["auto", "nccl", "gloo", "none"] = "auto"
    """Collective plane. auto: nccl where head and workers have CUDA, gloo elsewhere. none: control plane only."""
    join: Literal["checkpoint", "broadcast"] = "checkpoint"
    """How a worker that joins later gets theta: from the newest checkpoint and the commits since, or from the head's
    arena over the collective plane (if that fails, from the checkpoint)."""
    host: str | None = None
    """Address or name of the head's machine, IPv4 or IPv6 (::1, fe80::2%ib0); default: loopback for local runs, else
    the address of `interface`, else that of the default route."""
    interface: str | None = None
    """Network interface, as in NCCL_SOCKET_IFNAME."""
    heartbeat: Seconds = 2.0
    """Interval of a worker's heartbeats; unacknowledged results are resent at this interval."""
    heartbeat_timeout: Seconds = 30.0
    """A worker that stays silent longer than this loses its lease."""
    lease_timeout: Seconds = 3600.0
    """Maximum time of one evaluation; after it, another worker gets the evaluation."""
    collective_timeout: Seconds = 10.0
    """Time limit of each step of a process group: joining, connecting, one broadcast. After it, the control plane is
    used."""
    gloo_max_workers: int = Field(256, ge=1)
    """Largest number of workers that get commits by a Gloo broadcast; with more of them, all get them over the control
    plane. The head has two connections per worker, of 1024 open files where nodes have the usual limit, and a new group
    of 256 took 0.4 s, one of 512 1.4 s (docs/network.md). NCCL has no such limit."""
    head_timeout: Seconds = 600.0
    """How long a worker waits for a head to appear or to return."""

    @model_validator(mode="after")
    def _several_heartbeats(self) -> "TransportConfig":
        if self.heartbeat_timeout < 2 * self.heartbeat:
            raise ValueError(
                f"transport.heartbeat_timeout={self.heartbeat_timeout:g} must be at least twice transport.heartbeat="
                f"{self.heartbeat:g}, or one late heartbeat costs a worker its lease"
            )
        return self


class CheckpointConfig(Model):
    every: int = Field(10, ge=1)
    """Number of updates between two checkpoints; the final theta is always kept."""
    keep: int = Field(2, ge=1)
    """How many checkpoints to keep, newest first. The base model is checkpoint 0 and never removed."""


class StoreConfig(Model):
    hdf5_every: Seconds = 1.0
    """run.h5 is brought up to date at most this often."""
    hdf5_locking: bool = False
    """Whether HDF5 locks run.h5. Off by default: NFS and Lustre often lack file locks, and there is only one writer."""
    trajectories: int = Field(2, ge=0)
    """Number of episodes per version whose text is kept, for members and for the evaluated policy alike."""
    traces: bool = False
    """Keep the token ids and log-probabilities of every episode of the run in RUN/traces. A method that trains writes
    them in any case, and removes those that an update has consumed unless this is true."""


class LaunchConfig(Model):
    """How a local run starts its processes."""

    workers: int = Field(1, ge=1)
    """Worker processes; on a machine with GPUs, each gets engine.tensor_parallel of them in turn."""
    max_restarts: int = Field(5, ge=0)
    """Maximum number of restarts of each process in the whole run."""
    stop_timeout: Seconds = 30.0
    """Time between a request to stop and the moment when remaining processes are killed."""


_OURS = "hpc-es sets it, since head and workers depend on it"
_ONE_NODE = "each job has one node; set slurm.workers and slurm.workers_per_job"
NOT_FLAGS = {
    "partition": "set slurm.<role>.partition",
    "qos": "set slurm.<role>.qos",
    "cpus-per-task": "set slurm.<role>.cpus",
    "mem": "set slurm.<role>.memory",
    "time": "set slurm.<role>.time",
    "gres": "set slurm.<role>.gres",
    "gpus-per-task": "set slurm.<role>.gpus_per_task",
    "account": "set slurm.account",
    "array": "set slurm.workers and slurm.max_parallel",
    "signal": "set slurm.signal_lead",
    "nodes": _ONE_NODE,
    "ntasks": _ONE_NODE,
    "ntasks-per-node": _ONE_NODE,
    "output": _OURS,
    "error": _OURS,
    "open-mode": _OURS,
    "chdir": _OURS,
    "requeue": _OURS,
    "no-requeue": _OURS,
    "dependency": _OURS,
    "job-name": "it is run.name and the role",
}
"""Flags of sbatch that `slurm.<role>.flags` may not have, since something else decides them, and what."""


class JobConfig(Model):
    """Resources that one kind of job requests from Slurm. null: not requested, so the cluster's default applies."""

    partition: str | None = None
    """--partition"""
    qos: str | None = None
    """--qos"""
    cpus: int = Field(1, ge=1)
    """--cpus-per-task"""
    memory: str | None = None
    """--mem, as Slurm writes it: 64G."""
    time: Seconds = 3600.0
    """--time, rounded up to whole minutes as Slurm needs them."""
    gres: str | None = None
    """--gres, e.g. gpu:1. Clusters need either this or gpus_per_task."""
    gpus_per_task: int | None = Field(None, ge=1)
    """--gpus-per-task"""
    flags: tuple[str, ...] = ()
    """Further flags of sbatch, e.g. --constraint=a100, --reservation=NAME or --exclusive."""
    setup: tuple[str, ...] | None = None
    """Shell lines to run before this role starts. Default: slurm.setup."""
    container: str | None = None
    """Prefix of this role's command. Default: slurm.container."""
    python: str | None = None
    """Python of this role. Default: slurm.python."""

    @model_validator(mode="after")
    def _one_way_to_each(self) -> "JobConfig":
        if self.gres is not None and self.gpus_per_task is not None:
            raise ValueError(f"gres={self.gres} and gpus_per_task={self.gpus_per_task} ask twice for GPUs; keep one")
        for flag in self.flags:
            match = re.fullmatch(r"--([a-z][a-z-]*)(=[^\n]+)?", flag)
            if not match:
                raise ValueError(f"the flag {flag!r} must look like --name or --name=value, on one line")
            if (instead := NOT_FLAGS.get(match[1])) is not None:
                raise ValueError(f"{flag} cannot be one of the flags: {instead}")
        return self


class SlurmConfig(Model):
    """The jobs of a run on a Slurm cluster: one head, and an array of workers."""

    workers: int = Field(2, ge=1)
    """Number of worker jobs, the elements of the job array."""
    workers_per_job: int = Field(1, ge=1)
    """Workers in each of these jobs, for nodes that are allocated whole: srun starts them, each with
    slurm.worker.cpus and slurm.worker.gpus_per_task; slurm.worker.memory is for all of them together."""
    max_parallel: int | None = Field(None, ge=1)
    """Maximum number of worker jobs that run at the same time. Default: all."""
    account: str | None = None
    """--account of all jobs."""
    signal_lead: Seconds = 120.0
    """Time before the time limit at which a job gets the signal USR2."""
    max_restarts: int = Field(3, ge=0)
    """How often each worker job that failed is queued again, in the whole run."""
    setup: tuple[str, ...] = ()
    """Shell lines to run before the role starts, e.g. module load cuda. The job ends if one of them fails."""
    container: str | None = None
    """Prefix of the command, e.g. apptainer exec --nv hpc_es.sif; hpc-es is then the one inside the container."""
    python: str | None = None
    """Python of the compute nodes, e.g. /shared/venv/bin/python, or python for the one that `setup` activates. Default:
    the one that submits; in a container, the one of its hpc-es."""
    head: JobConfig = JobConfig()
    worker: JobConfig = JobConfig()

    @property
    def num_at_once(self) -> int:
        """Number of workers that run at the same time once the queue lets them."""
        return min(self.workers, self.max_parallel or self.workers) * self.workers_per_job

    @model_validator(mode="after")
    def _each_worker_has_its_gpus(self) -> "SlurmConfig":
        if self.workers_per_job > 1 and self.worker.gres is not None:
            raise ValueError(
                f"slurm.worker.gres={self.worker.gres} would give the same GPUs to all slurm.workers_per_job="
                f"{self.workers_per_job} workers of a job; set slurm.worker.gpus_per_task instead"
            )
        return self

    @model_validator(mode="after")
    def _time_for_more_than_the_end(self) -> "SlurmConfig":
        for role, job in (("head", self.head), ("worker", self.worker)):
            if job.time <= self.signal_lead:
                raise ValueError(
                    f"slurm.{role}.time={job.time:g} must be above slurm.signal_lead={self.signal_lead:g}, or the job "
                    f"is told to end as soon as it starts"
                )
        return self


class Config(Model):
    """One run. Sections are independent; what spans two of them is checked here."""

    run: RunConfig
    model: ModelConfig
    task: TaskConfig
    method: str = "es"
    """How candidates are made and what a cohort becomes: es, or package.module:Class for a method of your own."""
    es: EsConfig = EsConfig()
    sampling: SamplingConfig = SamplingConfig()
    eval: EvalConfig = EvalConfig()
    staleness: StalenessConfig = Sync()
    engine: EngineConfig = EngineConfig()
    head: HeadConfig = HeadConfig()
    transport: TransportConfig = TransportConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    store: StoreConfig = StoreConfig()
    launch: LaunchConfig = LaunchConfig()
    slurm: SlurmConfig = SlurmConfig()

    @model_validator(mode="after")
    def _cohorts_are_full(self) -> "Config":
        if isinstance(self.staleness, Tail) and sum(self.staleness.counts.values()) != self.es.population:
            raise ValueError(
                f"staleness.counts={self.staleness.counts} sum to {sum(self.staleness.counts.values())}, but "
                f"es.population={self.es.population} results make a cohort"
            )
        return self

    @model_validator(mode="after")
    def _endpoints_leave_no_traces(self) -> "Config":
        if self.engine.kind == "endpoint" and self.store.traces:
            raise ValueError(
                "store.traces=true needs the tokens that were sampled, which engine.kind=endpoint does not show: set "
                "store.traces=false, or use engine.kind=vllm or transformers"
            )
        return self

    @model_validator(mode="after")
    def _answers_fit(self) -> "Config":
        if self.engine.kind != "endpoint" and self.sampling.max_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} must be below engine.max_model_len="
                f"{self.engine.max_model_len}, or no prompt leaves room for an answer"
            )
        return self


TAGGED = {"staleness": "mode"}
"""Sections that are one of several kinds, and the key that tells which."""

HARMLESS = (
    "run.name",
    "run.dir",
    "run.group_readable",
    "run.max_failures_in_a_row",
    "head",
    "transport",
    "checkpoint",
    "store",
    "launch",
    "slurm",
    "engine.base",
    "engine.direct_map",
    "engine.threads",
    "engine.kv_cache_mib",
    "engine.probe_every",
    "task.step_timeout",
    "task.episode_timeout",
)
"""Keys (or whole sections) that may change when a run is resumed: they change no bit of its result."""
