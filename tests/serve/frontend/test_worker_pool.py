"""The ready workers as the scheduler sees them."""

from __future__ import annotations

from maskfx.scheduling.load import Demand, TemplateTier, Work
from maskfx.serve.frontend.worker_pool import GROW_AFTER, KNOWN_TEMPLATES, WorkerPool

WORK = Work(6, 48, 4)


def crew_of(*names: str, slots: int = 8) -> WorkerPool:
    pool = WorkerPool()
    for name in names:
        pool.join(name, slots, 0.0)
    return pool


def test_who_served_from_a_template_is_warm() -> None:
    pool = crew_of("a", "b")
    pool.warmed("a", "t", {"host": 10, "device": 4})
    assert pool.mates["a"].load.tier("t") is TemplateTier.DEVICE
    assert pool.mates["b"].load.tier("t") is TemplateTier.NONE
    assert pool.size("t") == 10
    assert pool.with_template("t") == ("a",)


def test_what_is_on_disk_all_can_load_also_who_comes_later() -> None:
    pool = crew_of("a", "b")
    pool.warmed("a", "t", {"host": 10, "disk": 10})
    pool.join("c", 8, 0.0)
    assert [pool.mates[n].load.tier("t") for n in "abc"] == [
        TemplateTier.HOST,
        TemplateTier.DISK,
        TemplateTier.DISK,
    ]
    pool.forget("t")
    assert [pool.mates[n].load.tier("t") for n in "abc"] == [TemplateTier.NONE] * 3
    assert pool.size("t") == 0


def test_a_disk_is_that_of_the_workers_that_share_it() -> None:
    pool = WorkerPool()
    for name, disk in (("a", "one"), ("b", "two"), ("c", "one")):
        pool.join(name, 8, 0.0, disk)
    pool.warmed("a", "t", {"disk": 10})
    pool.join("d", 8, 0.0, "two")
    pool.join("e", 8, 0.0, "one")
    assert pool.with_template("t") == ("a", "c", "e")
    pool.warmed("b", "t", {"disk": 10})
    assert pool.with_template("t") == ("a", "b", "c", "d", "e")
    pool.forget("t")
    pool.join("f", 8, 0.0, "one")
    assert pool.with_template("t") == ()


def test_what_a_worker_alone_had_in_memory_goes_with_it() -> None:
    pool = crew_of("a", "b")
    pool.warmed("a", "mine", {"host": 10})
    pool.warmed("a", "both", {"host": 10})
    pool.warmed("b", "both", {"host": 10})
    pool.warmed("a", "written", {"host": 10, "disk": 9})
    pool.leave("a")
    names = ("mine", "both", "written")
    assert [pool.sizes(name) for name in names] == [{}, {"host": 10}, {"disk": 9}]
    pool.leave("b")
    assert [pool.sizes(name) for name in names] == [{}, {}, {"disk": 9}]
    pool.leave("nobody")


def test_a_worker_that_dies_and_warms_up_again_leaves_what_others_have() -> None:
    pool = crew_of("a", "b")
    pool.warmed("a", "t", {"host": 10, "disk": 9})
    pool.warmed("b", "t", {"device": 4, "host": 8, "disk": 9})
    assert pool.sizes("t") == {"device": 4, "host": 10, "disk": 9}
    pool.leave("b")
    assert pool.sizes("t") == {"host": 10, "disk": 9}, "nothing of the dead one's device"
    pool.warmed("b", "t", {"device": 4})  # late, from a process that is gone
    pool.join("b2", 8, 0.0)
    pool.warmed("b2", "t", {"disk": 9})  # what it found on the disk
    assert pool.sizes("t") == {"host": 10, "disk": 9}
    assert pool.with_template("t") == ("a", "b2")


def test_who_says_no_bytes_has_it_on_the_host() -> None:
    pool = crew_of("a")
    pool.warmed("a", "t", {})
    assert pool.mates["a"].load.tier("t") is TemplateTier.HOST


def test_what_is_remembered_is_bounded() -> None:
    pool = crew_of("a", "b")
    for k in range(KNOWN_TEMPLATES + 5):
        pool.warmed("a", str(k), {"disk": 1})
    assert len(pool.mates["a"].load.warm) == KNOWN_TEMPLATES
    assert len(pool.mates["b"].load.warm) == KNOWN_TEMPLATES
    assert len(pool.on_disk) == len(pool.mates["a"].held) == KNOWN_TEMPLATES


def test_a_shortage_halves_once_for_all_members_of_a_step() -> None:
    mate = crew_of("a").mates["a"]
    for k in range(8):
        mate.start(Demand(str(k), WORK, 0.0), 0.0, alone=False)
    for k in range(8):
        assert mate.short() == 8
        mate.end(str(k))
    assert mate.load.slots == 4
    mate.stepped(1.0, 1.0)
    mate.start(Demand("x", WORK, 0.0), 1.0, alone=False)
    assert mate.short() == 1
    assert mate.load.slots == 1
    for _ in range(GROW_AFTER):
        mate.made()
    assert mate.load.slots == 2


def test_a_crowd_that_left_without_a_step_isnt_counted() -> None:
    mate = crew_of("a").mates["a"]
    for k in range(3):
        mate.start(Demand(str(k), WORK, 0.0), 0.0, alone=False)
    for k in range(3):
        mate.end(str(k))
    mate.start(Demand("x", WORK, 0.0), 0.0, alone=True)
    assert mate.short() == 1


def test_a_batch_grows_back_to_what_it_was_and_no_further() -> None:
    mate = crew_of("a", slots=2).mates["a"]
    for _ in range(5 * GROW_AFTER):
        mate.made()
    assert mate.load.slots == 2


def test_who_runs_one_alone_takes_no_others() -> None:
    pool = crew_of("a", "b")
    pool.mates["a"].start(Demand("x", WORK, 0.0), 0.0, alone=True)
    for id in "yz":
        pool.mates["b"].start(Demand(id, WORK, 0.0), 0.0, alone=False)
    assert [worker.name for worker in pool.open()] == ["b"]
    emptiest = pool.emptiest()
    assert emptiest is not None
    assert emptiest.name == "b"
    pool.mates["a"].end("x")
    assert len(pool.open()) == 2


def test_what_is_around_the_steps_is_known_of_who_was_alone() -> None:
    mate = crew_of("a").mates["a"]
    mate.start(Demand("x", WORK, 0.0), 10.0, alone=False)
    mate.stepped(12.0, 1.5)
    mate.stepped(14.0, 1.5)
    assert mate.around("x", 15.0) == 2.0
    assert mate.around("y", 15.0) is None
    mate.start(Demand("y", WORK, 0.0), 15.0, alone=False)
    assert mate.around("x", 16.0) is None, "not alone any more"
    mate.end("x")
    assert mate.around("y", 16.0) is None, "it had company at first"
    mate.end("y")
    mate.start(Demand("z", WORK, 0.0), 20.0, alone=False)
    mate.stepped(21.0, 0.5)
    assert mate.around("z", 21.0) == 0.5
