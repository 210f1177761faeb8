"""The core's decisions about the collective plane: backends, epochs, and transfers of theta."""

import pytest
from builders import built_commit
from theatre import Stage, make_config

from hpc_es import methods
from hpc_es.config.schema import TransportConfig
from hpc_es.head.core import Core
from hpc_es.head.crew import Crew
from hpc_es.head.events import Received, Tick, TransferEnded, TransferReady, Updated
from hpc_es.head.instructions import Append, Broadcast, Instruction, OpenGroup, Send, Transfer, Update
from hpc_es.head.ledger import Ledger
from hpc_es.head.plane import NCCL_TRIES, SOON_APPLIED, Plane
from hpc_es.methods.base import Tasks
from hpc_es.records import EvalId
from hpc_es.store import records as journal
from hpc_es.transport import messages
from hpc_es.transport.backends import Offer

BROADCAST = {"join": "broadcast", "backend": "auto"}


class Theatre:
    """A plane, its crew and the events that it left."""

    def __init__(self, offer: Offer = Offer("gloo"), **settings: str | int) -> None:  # noqa: B008
        self.crew, self.events = Crew(), list[str]()
        config = TransportConfig.model_validate({**BROADCAST, **settings})
        self.plane = Plane(config, self.crew, offer, lambda level, what, detail: self.events.append(f"{what} {detail}"))

    def join(self, name: str, offer: Offer = Offer("gloo"), version: int = 0, holding: EvalId | None = None) -> None:  # noqa: B008
        hello = messages.Hello(name, name, "host", 1, 0, {}, holding, 3, offer.backend, False, offer.gpu, version)
        self.plane.welcome(self.crew.join(hello, 0.0), hello, version=4)

    def state(self, name: str) -> str:
        return self.crew.workers[name].state


# --- epochs ----------------------------------------------------------------------------------------------------


def test_a_head_and_a_worker_on_one_gpu_meet_by_gloo_and_one_event_says_why() -> None:
    theatre = Theatre(Offer("nccl", "GPU-0"))
    for name, gpu in (("a", "GPU-0"), ("b", "GPU-1")):
        theatre.join(name, Offer("nccl", gpu))
        (opened,) = theatre.plane.change_epoch()
        assert isinstance(opened, OpenGroup)
        assert opened.backend == "gloo"
    assert len(theatre.events) == 1
    assert "2 processes share GPU-0" in theatre.events[0]


def test_nccl_that_does_not_come_up_gives_way_to_gloo() -> None:
    theatre = Theatre(Offer("nccl", "GPU-0"))
    theatre.join("a", Offer("nccl", "GPU-1"))
    backends = []
    for _ in range(NCCL_TRIES + 1):
        (opened,) = theatre.plane.change_epoch()
        assert isinstance(opened, OpenGroup)
        backends.append(opened.backend)
        theatre.plane.end_epoch(opened.epoch, "ncclSystemError")
    assert backends == ["nccl"] * NCCL_TRIES + ["gloo"]
    assert "uses Gloo instead of NCCL" in theatre.events[NCCL_TRIES]


def test_a_gloo_group_that_does_not_come_up_is_tried_again_less_and_less_often() -> None:
    theatre, tried = Theatre(), []
    theatre.join("a")
    for commit in range(300):
        for opened in theatre.plane.change_epoch():
            assert isinstance(opened, OpenGroup)
            tried.append(commit)
            theatre.plane.end_epoch(opened.epoch, "connect: timed out")
    assert tried == [0, 2, 6, 14, 30, 62, 126, 190, 254]
    (opened,) = (opened for _ in range(64) for opened in theatre.plane.change_epoch())
    theatre.plane.group_up(opened.epoch)  # type: ignore[union-attr]
    theatre.join("b")
    assert kinds(theatre.plane.change_epoch()) == [OpenGroup], "a new member is no failure"


def test_the_epoch_changes_once_per_commit_and_only_with_its_members() -> None:
    theatre = Theatre()
    theatre.join("a")
    theatre.join("b")
    (opened,) = theatre.plane.change_epoch()
    theatre.plane.group_up(1)
    assert theatre.plane.change_epoch() == []
    assert kinds(theatre.plane.announce(built_commit(5, 0.1, ()))) == [Send, Send, Broadcast]
    theatre.crew.leave("a")
    told = theatre.plane.announce(built_commit(6, 0.1, ()))
    assert kinds(told) == [Send]
    assert isinstance(told[0], Send)
    assert isinstance(told[0].message, messages.Announce)
    assert told[0].message.record is not None
    (opened,) = theatre.plane.change_epoch()
    assert isinstance(opened, OpenGroup)
    assert opened.workers == ("b",)


def test_too_many_workers_for_a_gloo_group_get_commits_over_the_control_plane_until_they_are_fewer() -> None:
    theatre = Theatre(gloo_max_workers=2)
    for name in "ab":
        theatre.join(name)
    assert kinds(theatre.plane.change_epoch()) == [OpenGroup]
    theatre.plane.group_up(1)
    for name in "cd":
        theatre.join(name)
        assert theatre.plane.change_epoch() == []
        told = theatre.plane.announce(built_commit(5, 0.1, ()))
        assert kinds(told) == [Send] * len(theatre.crew.workers)
        assert all(isinstance(send, Send) and send.message.record is not None for send in told)  # type: ignore[union-attr]
    theatre.crew.leave("a")
    theatre.crew.leave("b")
    assert kinds(theatre.plane.change_epoch()) == [OpenGroup]
    assert theatre.events == [
        "commits go over the control plane: 3 workers are too many for a Gloo group transport.gloo_max_workers=2",
        "commits go by broadcast again: 2 workers are few enough for a group ",
    ]


def test_the_size_of_nccl_groups_has_no_such_limit() -> None:
    theatre = Theatre(Offer("nccl", "GPU-h"), gloo_max_workers=1)
    for name in "ab":
        theatre.join(name, Offer("nccl", f"GPU-{name}"))
    (opened,) = theatre.plane.change_epoch()
    assert isinstance(opened, OpenGroup)
    assert (opened.backend, opened.workers, theatre.events) == ("nccl", ("a", "b"), [])


def test_a_transfer_takes_as_many_joiners_as_a_gloo_group_may_have() -> None:
    theatre = Theatre(gloo_max_workers=2)
    for name in "abc":
        theatre.join(name)
    assert theatre.plane.open_transfer(4, 99) == [Transfer(1, ("a", "b"), "gloo", 4, 99)]
    theatre.plane.end_transfer(("a", "b"), 10, 0.1, "")
    assert theatre.plane.open_transfer(4, 99) == [Transfer(2, ("c",), "gloo", 4, 99)]


# --- transfers -------------------------------------------------------------------------------------------------


def test_joiners_share_a_transfer_and_get_no_work_until_it_has_ended() -> None:
    theatre = Theatre()
    theatre.join("a")
    theatre.join("b")
    assert theatre.crew.first_idle() is None
    (transfer,) = theatre.plane.open_transfer(4, 99)
    assert transfer == Transfer(1, ("a", "b"), "gloo", 4, 99)
    theatre.join("c")
    assert theatre.plane.open_transfer(4, 99) == []  # one at a time
    theatre.plane.end_transfer(("a",), 10, 0.1, "")
    assert [theatre.state(name) for name in "abc"] == ["ready", "ready", "joining"]
    assert "b did not join" in theatre.events[-1]
    assert theatre.plane.open_transfer(5, 98) == [Transfer(2, ("c",), "gloo", 5, 98)]
    theatre.plane.end_transfer((), 0, 0.0, "nobody came")
    assert theatre.state("c") == "ready"
    assert "nobody came" in theatre.events[-1]


@pytest.mark.parametrize(
    "case",
    [
        {"version": 4},
        {"version": 4 - SOON_APPLIED},
        {"holding": EvalId(3, 0)},
        {"offer": Offer("none")},
        {"settings": {"join": "checkpoint"}},
        {"head": Offer("none")},
    ],
)
def test_a_joiner_without_a_transfer_is_ready_at_once(case: dict) -> None:
    theatre = Theatre(case.pop("head", Offer("gloo")), **case.pop("settings", {}))
    theatre.join("a", **case)
    assert theatre.state("a") == "ready"
    assert theatre.plane.open_transfer(4, 99) == []


def test_a_lost_joiner_is_not_called() -> None:
    theatre = Theatre()
    theatre.join("a")
    theatre.join("b")
    theatre.plane.open_transfer(4, 99)
    theatre.crew.leave("a")
    calls = {name: messages.OpenTransfer(1, 0, "gloo", "h", 1, 4, 99, 10, 10) for name in "ab"}
    assert theatre.plane.call(calls) == [Send("b", calls["b"])]
    theatre.plane.end_transfer(("b",), 10, 0.1, "")
    assert theatre.state("b") == "ready"


@pytest.mark.parametrize(
    ("settings", "offer", "told"),
    [
        ({"backend": "none"}, Offer("none"), ["transport.backend=none"]),
        ({}, Offer("none"), ["the head has no torch.distributed"]),
        ({}, Offer("gloo"), []),
        ({"join": "checkpoint", "backend": "none"}, Offer("none"), []),
    ],
)
def test_one_event_says_at_the_start_that_theta_cannot_be_sent(settings: dict, offer: Offer, told: list[str]) -> None:
    config = make_config(transport={**BROADCAST, **settings})
    ledger = Ledger()
    ledger.apply(journal.Started(0.0, journal.SCHEMA_VERSION, "stage", 1, 0, "{}", 1, {}, ""))
    core = Core(config, ledger, methods.make(config, Tasks(2, 3)), config_digest="", offer=offer)
    warnings = [
        f"{i.record.what} {i.record.detail}"
        for i in core.start(0.0)
        if isinstance(i, Append) and isinstance(i.record, journal.Noted)
    ]
    assert len(warnings) == len(told)
    assert all(why in text and "load a checkpoint" in text for why, text in zip(told, warnings, strict=True))


@pytest.fixture
def stage() -> Stage:
    """A run at version 3, whose digest is known, with a worker."""
    stage = Stage(make_config(run={"num_updates": 5}, transport=BROADCAST, eval={"num_tasks": 0}))
    stage.add_worker("old")
    while stage.core.ledger.version < 3 or 3 not in stage.core.ledger.digests:
        stage.move(stage.moves()[0])
    return stage


def test_commits_go_out_during_a_transfer_and_the_arena_updates_after_it(stage: Stage) -> None:
    done: list[Instruction] = []

    def tell(event: object) -> None:
        instructions = stage.core.handle(event, stage.now)  # type: ignore[arg-type]
        done.extend(instructions)
        stage.perform(instructions)

    tell(Received(messages.Hello("new", "new", "host", 1, stage.core.ledger.digests[0], {}, collective="gloo")))
    assert stage.core.crew.workers["new"].state == "joining"
    tell(Tick())
    assert kinds(done)[-1] is Transfer
    tell(TransferReady({"new": messages.OpenTransfer(1, 0, "gloo", "h", 1, 3, 0, 10, 10)}))
    while stage.core.ledger.version < 4:  # the arena's thread is busy, so no arena job is done
        stage.move(next(move for move in stage.moves() if move != "arena"))
    assert isinstance(stage.arena_jobs[-1] if stage.arena_jobs else None, Update | OpenGroup)
    assert stage.core.crew.workers["new"].state == "joining"
    tell(TransferEnded(("new",), 10, 0.1))
    assert stage.core.crew.workers["new"].state == "ready"
    assert any(isinstance(r, journal.Noted) and "sent theta_3 to new" in r.what for r in stage.records)


def test_no_transfer_begins_before_the_arena_has_come_to_the_version(stage: Stage) -> None:
    stage.core.ledger.digests.pop(3)
    stage.handle(Received(messages.Hello("new", "new", "h", 1, stage.core.ledger.digests[0], {}, collective="gloo")))
    assert not any(isinstance(i, Transfer) for i in stage.core.handle(Tick(), stage.now))
    (transfer,) = [i for i in stage.core.handle(Updated(3, 77, 0.0, 0.0), stage.now) if isinstance(i, Transfer)]
    assert (transfer.version, transfer.digest) == (3, 77)


def test_a_joiner_gets_nothing_when_no_work_is_left(stage: Stage) -> None:
    while 5 not in stage.core.ledger.digests:
        stage.move(stage.moves()[0])
    stage.handle(Received(messages.Hello("new", "new", "h", 1, stage.core.ledger.digests[0], {}, collective="gloo")))
    assert not any(isinstance(i, Transfer) for i in stage.core.handle(Tick(), stage.now))


def kinds(instructions: list[Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]
