"""The Java virtual machine that TextWorldExpress runs in: one per process, shared by all its environments.

Invariant: it never outlives the process that started it, however that ends. Java exits at the end of its standard
input, and the other end of that pipe is held by this process alone; signals that are meant for a job do not reach it.
It listens on a free port of the loopback address, and answers only who has the secret that it made up.

Measured on two busy cores (tools/bench/twx.py, game coin): from nothing to the first prompt 0.8 s, of which 0.5 s are
CPU time; 62 MiB then, 178 MiB with 64 episodes at once and hardly more after 1,000; a step 1 ms alone, and 380 to
710 steps a second in all.
"""

import json
import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_es.errors import ConfigError, EnvError

HEAP_MIB = 128
"""Of the whole virtual machine; a game takes well below one."""
STOP_SECONDS = 5.0

_OPTIONS = (
    f"-Xmx{HEAP_MIB}m",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # the second compiler takes memory and a core, and games last milliseconds
    "-XX:ActiveProcessorCount=1",  # sizes Java's own pools; games run in as many threads as ask for them
    "-XX:-UsePerfData",  # no files in /tmp, in the working directory, or of the memory
    "-XX:ErrorFile=/dev/null",
    "-XX:-CreateCoredumpOnCrash",
)
_DEAF = 'trap "" HUP INT TERM USR1 USR2; exec "$@"'
"""Java keeps ignoring what its parent ignored. USR2 (time is short) would abort it, INT would end it before us."""

State = Mapping[str, Any]
"""What a game says after a step: observation, look, inventory, validActions, score, tasksuccess, taskfailure."""


class Game:
    """One game at a time; from any thread, but one call at once."""

    def __init__(self, jvm: "_Jvm", name: str, params: str) -> None:
        self._jvm, self._name = jvm, name
        self._begun: tuple[int, str] | None = None
        self._done: list[str] = []
        self._interface: Any = jvm.call(jvm.gateway.jvm.textworldexpress.runtime.PythonInterface)
        if refusal := jvm.call(self._interface.load, name, params):
            raise ConfigError(refusal.strip())

    def seeds(self, fold: str) -> list[int]:
        """Of a fold: train, dev or test."""
        listed = self._jvm.call(getattr(self._interface, f"getSeeds{fold.capitalize()}"))
        try:
            seeds: list[int] = json.loads(self._jvm.call(listed.toString))  # one call, not one for each
            return seeds
        finally:
            self._jvm.forget(listed)

    def start(self, seed: int, fold: str) -> tuple[str, State]:
        """(the task in the game's words, what it shows first)."""
        self._jvm.has_played = True
        with self._jvm.alone(self):
            self._begun, self._done = (seed, fold), []
            state = self._start(seed, fold)
        return self._jvm.call(self._interface.getTaskDescription), state

    def step(self, action: str) -> State:
        with self._jvm.alone(self) as was_disturbed:
            if was_disturbed and self._begun is not None:
                self._start(*self._begun)
                for done in self._done:
                    self._step(done)
            self._done.append(action)
            return self._step(action)

    def properties(self, seed: int, fold: str) -> Mapping[str, int]:
        """By what numbers a game was made; it takes the place of the one that is running."""
        with self._jvm.alone(self):
            self._start(seed, fold)
        properties: dict[str, int] = json.loads(self._jvm.call(self._interface.getGenerationPropertiesJSON))
        return properties

    def close(self) -> None:
        """Free what Java holds of it."""
        self._jvm.forget(self._interface)
        _leave(self._jvm)

    @property
    def shares_objects(self) -> bool:
        """The things of a sorting problem exist once in Java: a game that starts takes them out of all others."""
        return self._name == "sorting"

    def _start(self, seed: int, fold: str) -> State:
        return _state(self._jvm.call(self._interface.generateNewGameJSON, seed, fold, False))

    def _step(self, action: str) -> State:
        return _state(self._jvm.call(self._interface.stepJSON, action))


def _state(answer: str) -> State:
    state: dict[str, Any] = json.loads(answer)
    if str(state["observation"]).startswith("ERROR"):
        raise EnvError(f"TextWorldExpress: {state['observation']}")
    return state


class _Jvm:
    """A running virtual machine. Errors: ConfigError when Java or the package is missing, EnvError when it ends."""

    def __init__(self) -> None:
        classpath, folder = _package()
        java = _java()
        command = [java, *_OPTIONS, "-cp", classpath, "py4j.GatewayServer"]
        self.process = subprocess.Popen(
            ["sh", "-c", _DEAF, "sh", *command, "--die-on-broken-pipe", "--enable-auth", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            cwd=folder,  # where the games look for their data
            env={**os.environ, "_JAVA_SR_SIGNUM": "40"},  # Java suspends threads by USR2 unless told otherwise
        )
        self.gateway = self._connect(java)
        self.num_games = 0
        self.has_played = False
        self._sharing = threading.Lock()
        self._last_sharing: Game | None = None

    def _connect(self, java: str) -> Any:
        from py4j.java_gateway import GatewayParameters, JavaGateway  # type: ignore[import-untyped]

        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:  # it may say something before the port and the secret
            if line.strip().isdecimal():
                break
            said.append(line.strip())
        else:
            raise EnvError(
                f"{java} ended before it served TextWorldExpress: {' '.join(said[-5:]) or 'it said nothing'}; "
                f"check that `java -version` works there and that {HEAP_MIB} MiB are left for it"
            )
        secret = self.process.stdout.readline().strip()
        threading.Thread(target=deque, args=(self.process.stdout, 0), daemon=True, name="twx-output").start()
        # Memory is freed by us: collected objects would call Java from whatever thread they are collected in.
        parameters = GatewayParameters(port=int(line), auth_token=secret, enable_memory_management=False)
        return JavaGateway(gateway_parameters=parameters)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @contextmanager
    def alone(self, game: Game) -> Iterator[bool]:
        """Whether another game has touched this one's objects since it was alone with them last; that one is then
        played again from its start, which takes milliseconds."""
        if not game.shares_objects:
            yield False
            return
        with self._sharing:
            was_disturbed = self._last_sharing is not game
            self._last_sharing = game
            yield was_disturbed

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]

        try:
            return method(*args)
        except Py4JJavaError as error:
            raise EnvError(f"TextWorldExpress: {' '.join(str(error).splitlines()[:2])}") from error
        except (Py4JError, OSError) as error:
            how = f"{str(error).splitlines()[0]}; status {self._end()}"
            raise EnvError(f"the Java of TextWorldExpress ended ({how}); the next episode starts a new one") from error

    def forget(self, reference: Any) -> None:
        """Java frees an object. One that does not answer has freed everything: what is over is not undone by that."""
        from py4j.protocol import Py4JError

        try:
            self.gateway.detach(reference)
        except (Py4JError, OSError):
            self._end()

    def _end(self) -> int:
        """Its exit status; one that lost a connection and still runs is of no use."""
        self.process.kill()
        return self.process.wait()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.gateway.close()
        self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_lock = threading.Lock()
_shared: _Jvm | None = None


def open_game(name: str, params: str) -> Game:
    """A game of this process's virtual machine, which is started where none is running.

    Errors: ConfigError for a game or parameters that do not exist, or when Java or the package is missing; EnvError.
    """
    global _shared
    with _lock:
        if _shared is None or not _shared.is_running:
            _shared = _Jvm()
        jvm = _shared
        jvm.num_games += 1
    try:
        return Game(jvm, name, params)
    except BaseException:
        _leave(jvm)
        raise


def _leave(jvm: _Jvm) -> None:
    """A game is closed. A virtual machine that nobody played in ends with its last: heads only count tasks."""
    global _shared
    with _lock:
        jvm.num_games -= 1
        if jvm is _shared and jvm.num_games == 0 and not jvm.has_played:
            jvm.stop()
            _shared = None


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(f"{home}/bin/java" if home else "java")
    if java is None:
        missing = f"JAVA_HOME={home} has no bin/java" if home else "no java is on PATH"
        raise ConfigError(
            f"TextWorldExpress runs in Java, and {missing}: install one (apt install default-jre-headless, or module "
            "load java), or set JAVA_HOME"
        )
    return java


def _package() -> tuple[str, Path]:
    """(classpath, folder of the games' data)."""
    try:
        from py4j.java_gateway import find_jar_path
        from textworld_express.constants import BASEPATH, JAR_PATH  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"TextWorldExpress is not installed ({error}): pip install 'hpc_es[twx]'") from error
    return os.pathsep.join((find_jar_path(), JAR_PATH)), Path(BASEPATH)
