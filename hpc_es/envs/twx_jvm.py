"""The Java virtual machine that runs TextWorldExpress: one per process, shared by all its environments.

Invariant: it never outlives the process that started it, however that ends. Java exits at the end of its standard
input, and only this process holds the other end of that pipe; signals sent to the job do not reach Java. It listens on
a free port of the loopback address and requires a secret that it generates.

Measured on two busy cores (tools/bench/twx.py, game coin): 0.8 s from the start to the first prompt, 0.5 s of it CPU
time; 62 MiB of memory then, 178 MiB with 64 episodes at once and hardly more after 1,000; one step takes 1 ms alone,
and the total is 380 to 710 steps per second.
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
"""Heap of the whole virtual machine in MiB; one game takes well below 1 MiB."""
STOP_SECONDS = 5.0

_OPTIONS = (
    f"-Xmx{HEAP_MIB}m",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # the second compiler takes memory and a core, but games last milliseconds
    "-XX:ActiveProcessorCount=1",  # limits Java's own thread pools, not the threads that run games
    "-XX:-UsePerfData",  # no files in /tmp or the working directory, and no memory dumps
    "-XX:ErrorFile=/dev/null",
    "-XX:-CreateCoredumpOnCrash",
)
_IGNORE_SIGNALS = 'trap "" HUP INT TERM USR1 USR2; exec "$@"'
"""Starts Java with the job's signals ignored, which it inherits. SIGUSR2 (the job's time limit is near) would abort
Java, and SIGINT would end it before this process."""

State = Mapping[str, Any]
"""A game's state after a step: observation, look, inventory, validActions, score, tasksuccess, taskfailure."""


class Game:
    """Plays one game at a time. May be called from any thread, but not from two at once."""

    def __init__(self, jvm: "_Jvm", name: str, params: str) -> None:
        self._jvm, self._name = jvm, name
        self._begun: tuple[int, str] | None = None
        self._done: list[str] = []
        self._interface: Any = jvm.call(jvm.gateway.jvm.textworldexpress.runtime.PythonInterface)
        if refusal := jvm.call(self._interface.load, name, params):
            raise ConfigError(refusal.strip())

    def seeds(self, fold: str) -> list[int]:
        """The seeds of a fold: train, dev or test."""
        listed = self._jvm.call(getattr(self._interface, f"getSeeds{fold.capitalize()}"))
        try:
            seeds: list[int] = json.loads(self._jvm.call(listed.toString))  # one call for all seeds
            return seeds
        finally:
            self._jvm.forget(listed)

    def start(self, seed: int, fold: str) -> tuple[str, State]:
        """Start a game; return its task description and first state."""
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
        """The numbers that a game was generated from. Generating it replaces the running game."""
        with self._jvm.alone(self):
            self._start(seed, fold)
        properties: dict[str, int] = json.loads(self._jvm.call(self._interface.getGenerationPropertiesJSON))
        return properties

    def close(self) -> None:
        """Release the game's memory in Java."""
        self._jvm.forget(self._interface)
        _leave(self._jvm)

    @property
    def shares_objects(self) -> bool:
        """Whether games share objects in Java: a new sorting game takes its objects out of all other games."""
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
            ["sh", "-c", _IGNORE_SIGNALS, "sh", *command, "--die-on-broken-pipe", "--enable-auth", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            cwd=folder,  # the games look for their data here
            env={**os.environ, "_JAVA_SR_SIGNUM": "40"},  # by default Java uses SIGUSR2 to suspend threads
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
        for line in self.process.stdout:  # it may print other lines before the port and the secret
            if line.strip().isdecimal():
                break
            said.append(line.strip())
        else:
            raise EnvError(
                f"{java} ended before it served TextWorldExpress: {' '.join(said[-5:]) or 'no output'}; "
                f"check that `java -version` works there and that {HEAP_MIB} MiB of memory are free"
            )
        secret = self.process.stdout.readline().strip()
        threading.Thread(target=deque, args=(self.process.stdout, 0), daemon=True, name="twx-output").start()
        # We free Java's memory ourselves: py4j's garbage collection would call Java from arbitrary threads.
        parameters = GatewayParameters(port=int(line), auth_token=secret, enable_memory_management=False)
        return JavaGateway(gateway_parameters=parameters)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @contextmanager
    def alone(self, game: Game) -> Iterator[bool]:
        """Lock the games that share objects; yield whether another game has changed this one's objects since the last
        time. The caller then replays this game from its start, which takes milliseconds."""
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
        """Make Java free an object. Errors are ignored, because a Java that does not answer has ended and freed all."""
        from py4j.protocol import Py4JError

        try:
            self.gateway.detach(reference)
        except (Py4JError, OSError):
            self._end()

    def _end(self) -> int:
        """Kill Java if it still runs, because it is useless without a connection; return its exit status."""
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
    """Open a game in this process's virtual machine, which is started if none is running.

    Errors: ConfigError for an unknown game or parameter, or when Java or the package is missing; EnvError.
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
    """Note that a game was closed. If none was ever played, the virtual machine ends with the last game, because this
    process only counts tasks."""
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
            f"TextWorldExpress runs in Java, but {missing}: install it (apt install default-jre-headless, or module "
            "load java), or set JAVA_HOME"
        )
    return java


def _package() -> tuple[str, Path]:
    """The classpath, and the folder with the games' data."""
    try:
        from py4j.java_gateway import find_jar_path
        from textworld_express.constants import BASEPATH, JAR_PATH  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"TextWorldExpress is not installed ({error}): pip install 'hpc_es[twx]'") from error
    return os.pathsep.join((find_jar_path(), JAR_PATH)), Path(BASEPATH)
