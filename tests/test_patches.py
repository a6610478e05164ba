from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from integrations.patches import Patches


class Host:
    limit = 3

    def __init__(self) -> None:
        self.path = "last.pt"

    def step(self) -> str:
        return "host"


def test_put_returns_what_was_there_and_undo_puts_it_back() -> None:
    host, patches = Host(), Patches()
    before = dict(vars(host))
    step = patches.put(host, "step", lambda: "ours")
    assert patches.put(host, "path", "other") == "last.pt"
    assert patches.put(host, "limit", 5) == 3
    assert (host.step(), step(), host.path, host.limit) == ("ours", "host", "other", 5)
    assert Host().step() == "host"
    patches.undo()
    assert vars(host) == before
    assert (host.step(), host.limit) == ("host", 3)
    patches.undo()  # twice is once


def test_one_attribute_patched_twice_comes_back_in_reverse() -> None:
    host, patches = Host(), Patches()
    first = patches.put(host, "step", lambda: "first")
    second = patches.put(host, "step", lambda: "second after " + first())
    assert host.step() == "second after host"
    assert second() == "first"
    patches.undo()
    assert "step" not in vars(host)


def test_an_attribute_that_is_not_there_is_refused_and_nothing_is_listed() -> None:
    host, patches = Host(), Patches()
    with pytest.raises(AttributeError):
        patches.put(host, "renamed_in_a_new_release", None)
    assert patches.names() == []
    assert "renamed_in_a_new_release" not in vars(host)


def test_a_patch_that_the_host_removed_by_itself_does_not_stop_the_undo() -> None:
    host, patches = Host(), Patches()
    patches.put(host, "path", "other")
    patches.put(host, "step", lambda: "ours")
    del host.step
    patches.undo()
    assert host.path == "last.pt"


def test_lifted_shows_the_host_as_it_was_and_puts_the_patches_back_on_errors_too() -> None:
    host, other, patches = Host(), Host(), Patches()
    patches.put(host, "step", lambda: "first")
    patches.put(host, "step", lambda: "second")
    patches.put(other, "step", lambda: "other")
    with contextlib.suppress(KeyError), patches.lifted(host):
        assert vars(copy.deepcopy(host)) == {"path": "last.pt"}
        assert other.step() == "other"
        raise KeyError
    assert host.step() == "second"
    patches.undo()
    assert vars(host) == {"path": "last.pt"}


def test_names_of_what_is_patched() -> None:
    host, patches = Host(), Patches()
    patches.put(host, "step", None)
    patches.put(Host, "limit", 4)
    assert patches.names() == ["Host.step", "Host.limit"]
    patches.undo()
    assert Host.limit == 3


def test_copies_and_pickles_are_without_patches_and_the_owner_keeps_them() -> None:
    host, run, entry = Host(), Patches(), Patches()
    entry.put(host, "step", lambda: "entry")
    run.put(host, "step", lambda: "run")
    run.put(host, "path", "other")
    for made in (copy.deepcopy(host), copy.copy(host), pickle.loads(pickle.dumps(host)), pickled_in_python(host)):
        assert vars(made) == {"path": "last.pt"}
        assert made.step() == "host"
        made.path = "its own"
    assert (host.step(), host.path) == ("run", "other")
    run.undo()
    assert vars(copy.deepcopy(host)) == {"path": "last.pt"}
    assert host.step() == "entry"
    entry.undo()
    assert vars(host) == {"path": "last.pt"}


def pickled_in_python(thing: Any) -> Any:
    file = io.BytesIO()
    pickle._Pickler(file, 2).dump(thing)
    return pickle.loads(file.getvalue())


def test_a_copy_keeps_what_was_set_over_a_patch_and_its_own_way_of_copying() -> None:
    class Cycle(Host):
        def __deepcopy__(self, memo: dict[int, Any]) -> Cycle:
            made = memo[id(self)] = Cycle()
            vars(made).update(copy.deepcopy(vars(self), memo))
            made.copies = getattr(self, "copies", 0) + 1
            return made

    host, told, patches = Cycle(), [], Patches(lambda made: told.append(made))
    host.me = host  # type: ignore[attr-defined]
    patches.put(host, "path", "other")
    patches.put(host, "step", lambda: "ours")
    host.path = "the user's"
    made = copy.deepcopy([host])[0]
    assert (made.path, made.step(), made.copies, made.me is made) == ("the user's", "host", 1, True)
    assert told == [made]
    patches.undo()
    assert host.path == "last.pt"


def test_a_module_is_copied_and_saved_as_the_bare_one_with_slots_too() -> None:
    class Slotted:
        __slots__ = ("__dict__", "size")

        def run(self) -> str:
            return "host"

    model, slotted, patches = nn.Linear(2, 2), Slotted(), Patches()
    slotted.size = 5
    for owner, name in ((model, "forward"), (slotted, "run")):
        patches.put(owner, name, lambda *_: "ours")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for made in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert not {"forward", "__deepcopy__", "__reduce_ex__"} & set(vars(made))
        assert torch.equal(made.weight, model.weight)
        assert made.weight is not model.weight
    assert (copy.deepcopy(slotted).run(), copy.copy(slotted).size, slotted.run()) == ("host", 5, "ours")


def test_copies_and_pickles_of_a_patched_object_are_as_it_was() -> None:
    host, patches = Host(), Patches()
    patches.put(host, "step", lambda: "ours")
    patches.put(host, "path", "other")
    patches.around(host, "step", lambda inner: inner())
    for made in (copy.deepcopy(host), copy.copy(host), pickle.loads(pickle.dumps(host))):
        assert vars(made) == {"path": "last.pt"}
        assert made.step() == "host"
    assert host.path == "other"
    patches.undo()
    assert vars(host) == {"path": "last.pt"}


def test_a_copy_keeps_what_a_user_has_put_over_a_patch() -> None:
    host, patches = Host(), Patches()
    outside = patches.around(host, "step", lambda inner: "ours, then " + inner())
    host.step = users = lambda: "user's"  # type: ignore[method-assign]
    assert copy.copy(host).step is users
    assert outside.stay()
    assert host.step() == "ours, then user's"
    assert copy.copy(host).step is users


def test_around_stays_outside_of_users_wrappers_and_calls_each_once() -> None:
    host, patches, ran = Host(), Patches(), list[str]()
    outside = patches.around(host, "step", lambda inner: (ran.append("ours"), inner())[1])

    def wrap(name: str) -> None:
        through = host.step
        host.step = lambda: (ran.append(name), through())[1]  # type: ignore[method-assign]

    for name in ("first", "second"):
        wrap(name)
        assert outside.stay()
    assert not outside.stay()
    assert host.step() == "host"
    assert ran == ["ours", "second", "first"]
    patches.undo()
    assert vars(host) == {"path": "last.pt"}
