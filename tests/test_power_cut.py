"""Power cuts, simulated: whatever of a run's calls a cut leaves on the disk, it recovers to all old or all new."""

import contextlib
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from crashes import FAST, layers, micro_batch, tensors, weighted, with_state
from power import File, Op, Place, cuts
from support import write, write_index
from tiers import PARTS, in_parts, up_to

import gradtool
from gradtool import BadInputError, SystemRefusedError
from gradtool.store.transaction import locks, recovery
from gradtool.store.transaction.commit import Commit

# Which file a call is about is told by /proc.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which file a descriptor is")


def one_file(folder):
    write(folder / "model.safetensors", tensors(0, 150))


def shards(folder, *numbers):
    write_index(folder, {f"model-{i}.safetensors": tensors(i, 150) for i in numbers})


class Case(NamedTuple):
    """A data set, the command that changes it, and the folders of the data and of other files that it changes."""

    make: object
    command: object
    folders: tuple[str, ...] = ("set",)
    beside: tuple[str, ...] = ()


CASES = {
    "clip-file": Case(
        lambda root: one_file(root / "set"),
        lambda root, **options: gradtool.clip(root / "set/model.safetensors", max_norm=1, **options),
    ),
    "clip-set": Case(
        lambda root: shards(root / "set", 0, 1, 2),
        lambda root, **options: gradtool.clip(root / "set", max_norm=1, **options),
    ),
    "clip-two-folders": Case(
        lambda root: (shards(root / "a", 0, 1), one_file(root / "b")),
        lambda root, **options: gradtool.clip([root / "a", root / "b"], max_norm=1, concat=True, **options),
        ("a", "b"),
    ),
    "state-file": Case(
        lambda root: with_state(root / "set", 1, 150),
        lambda root, **options: gradtool.clip(
            root / "set/model.safetensors", limit="z=2.5", state=root / "set/clip.json", **options
        ),
    ),
    "state-elsewhere": Case(
        lambda root: (shards(root / "set", 0, 1), (root / "states").mkdir()),
        lambda root, **options: gradtool.clip(
            root / "set", limit="percentile=10", max_norm=1, state=root / "states/clip.json", **options
        ),
        beside=("states",),
    ),
    "accumulate-set": Case(
        lambda root: (shards(root / "set", 0, 1), shards(root / "other", 0, 1)),
        lambda root, **options: gradtool.accumulate(root / "other", into=root / "set", **options),
    ),
    "zero-set": Case(
        lambda root: shards(root / "set", 0, 1, 2),
        lambda root, **options: gradtool.zero(root / "set", **options),
    ),
    "total-set": Case(
        lambda root: (weighted(root / "set", 3, 150), micro_batch(root / "other", 3, 150)),
        lambda root, **options: gradtool.accumulate(
            root / "other", into=root / "set", weight_key="n", missing="skip", **options
        ),
    ),
    "zero-total-file": Case(
        lambda root: weighted(root / "set", 1, 150),
        lambda root, **options: gradtool.zero(root / "set", **options),
    ),
    "layernorm-set": Case(
        lambda root: layers(root / "set", 2, 600),
        lambda root, **options: gradtool.layernorm_backward(root / "set", **options),
    ),
    "output-folder": Case(
        lambda root: (shards(root / "set", 0, 1), (root / "out").mkdir()),
        lambda root, **options: gradtool.clip(root / "set", max_norm=1, output_dir=root / "out", **options),
        ("out",),
    ),
    "new-output-folder": Case(
        lambda root: shards(root / "set", 0, 1),
        lambda root, **options: gradtool.clip(root / "set", max_norm=1, output_dir=root / "out", **options),
        ("out",),
    ),
    "created-output-folder": Case(
        lambda root: shards(root / "set", 0, 1),
        lambda root, **options: gradtool.accumulate(
            root / "set", output_dir=root / "out", shard_like=root / "set", **options
        ),
        ("out",),
    ),
}
EVERY = [
    f"{case}-{mode}" for case in CASES for mode in ("replace", "inplace") if "output" not in case or mode == "replace"
]
SAMPLED = [
    *("clip-file-inplace", "clip-set-replace", "clip-two-folders-inplace", "total-set-inplace"),
    *("state-file-replace", "state-file-inplace", "state-elsewhere-inplace"),
    *("layernorm-set-replace", "new-output-folder-replace", "created-output-folder-replace"),
]
CRASHED = [
    *("clip-file-replace", "clip-file-inplace", "clip-set-replace"),
    *("clip-two-folders-replace", "clip-two-folders-inplace"),
]


def scenes(names, sampled):
    parts = in_parts({name: name for name in names}, sampled)
    return pytest.mark.parametrize(("scene", "part"), parts, indirect=["scene"])


class Scene:
    """A command on its data set, its calls recorded, and what the files are before and after."""

    def __init__(self, name):
        case, _, mode = name.rpartition("-")
        own = CASES[case]
        # In memory where possible: what a cut loses is simulated.
        self._home = Path(tempfile.mkdtemp(prefix="gradtool-test-", dir=FAST))
        root = self._home / "data"
        root.mkdir()
        own.make(root)
        self.place = Place(root, self._home / "vault")
        self.folders, self._beside = ([root / folder for folder in some] for some in (own.folders, own.beside))
        self.disk = self.place.disk
        self._states = {"old": (self.place.files(), self.look())}
        self.calls = self.place.record(lambda: own.command(root, write=mode, threads=1))
        self._states["new"] = (self.place.files(), self.look())
        # The recorded calls alone turn the old files into the new ones, so none is missing.
        played = self.disk.copy()
        for call in self.calls:
            played.do(call)
        self.place.show(played.after(played.pending))
        assert self.place.files() == self._states["new"][0] != self._states["old"][0]

    def look(self):
        """What a reader finds: the norm of the data, or why there is none."""
        try:
            return gradtool.norm(self.folders, threads=1).norm
        except (BadInputError, SystemRefusedError) as error:
            return error.problems[0].code

    def recover(self, *, backwards=False):
        """What recovering says that has become of the files: "new", nothing, or why that cannot be said."""
        folders = [self.place.root, *self._beside, *(folder for folder in self.folders if folder.is_dir())]
        try:
            # The machine was started again since, so no process is the one that a log names.
            # And no call sets the time of an inode's last change, so that is another one on every disk that is shown.
            with (
                mock.patch.object(locks, "boot_id", return_value="another"),
                mock.patch.object(recovery, "is_replaceable", _is_replaceable),
            ):
                done = gradtool.recover(folders[::-1] if backwards else folders)
        except SystemRefusedError as error:
            return str(error)
        return "new" * done.finished

    def state(self):
        """Whether all files are "old" or "new", with nothing beside them; else, what each of them is."""
        now = self.place.files()
        for name, (files, _) in self._states.items():
            if now == files:
                return name
        return {
            path: [name for name, (files, _) in self._states.items() if files.get(path) == data] or "neither"
            for path, data in now.items()
        }

    def each_call(self, part):
        """The calls of a part, by number from 1."""
        return set(up_to(len(self.calls), part))

    def norm_of(self, state):
        return self._states[state][1]

    def close(self):
        shutil.rmtree(self._home)


@pytest.fixture
def scene(request):
    scene = Scene(request.param)
    yield scene
    scene.close()


def check(scene, cut, *, backwards=False, before=""):
    """Recover from a cut: whether the files are "old" or "new" then, all of them; anything else is an error."""
    scene.place.show(cut.disk)
    looked, found = scene.look(), scene.state()
    said, state = scene.recover(backwards=backwards), scene.state()
    story = f"{before}{cut}\n  found {found}, recovered to {state}; said {said!r}"
    assert state in ("old", "new"), story
    assert said in ("", state), story
    # No reader saw a mixture before, nor the other state.
    assert looked in ("unfinished", scene.norm_of(state)), story
    return state


@scenes(EVERY, SAMPLED)
def test_what_any_power_cut_leaves_recovers_to_all_old_or_all_new(scene, part):
    states = set()
    for cut in cuts(scene.disk, scene.calls, 16, at=scene.each_call(part)):
        state = check(scene, cut, backwards=cut.calls % 2 == 1)
        # What a run that has returned has done, stays done.
        assert state == "new" or not cut.is_last, str(cut)
        states.add(state)
    assert states == {"old", "new"}


@scenes(CRASHED, ["clip-file-inplace", "clip-two-folders-replace"])
@pytest.mark.parametrize("end", ["kill", "cut"])
def test_a_power_cut_while_a_crashed_run_is_recovered_does_no_harm_either(scene, end, part):
    disk, seen, struck = scene.disk.copy(), defaultdict(set), scene.each_call(part)
    rng = random.Random(0)  # noqa: S311 - the same every time
    for number, call in enumerate(scene.calls, 1):
        disk.do(call)
        if end == "cut":
            left = disk.after([op for op in disk.pending if rng.random() < 0.5])
        else:
            # After a kill all writes are visible, though few of them are safe.
            left = disk.copy()
            left.hour += 1
        if number not in struck:
            continue
        scene.place.show(left.after(left.pending))
        said = []
        calls = scene.place.record(lambda said=said: said.append(scene.recover()))
        before = f"{end} after call {number}, {str(call)[:150]}; recovered, to {said[0]!r}; then "
        for cut in cuts(left, calls, 4, seen[said[0]]):
            state = check(scene, cut, before=before)
            # And what was said to be finished, or undone, is that.
            assert not cut.is_last or said[0] in ("", state), f"{before}{cut}"


def _is_replaceable(now, move):
    return (now.st_size, now.st_mtime_ns) == (move.size, move.mtime_ns)


class CalledOff(Scene):
    """A run in place that fails at its end, when all is built and nothing is changed."""

    def __init__(self):
        self._home = Path(tempfile.mkdtemp(prefix="gradtool-test-", dir=FAST))
        root = self._home / "data"
        root.mkdir()
        shards(root / "set", 0, 1)
        self.place = Place(root, self._home / "vault")
        self.folders, self._beside, self.disk = [root / "set"], [], self.place.disk
        self._states = {"old": (self.place.files(), self.look())}
        self.calls = self.place.record(self._fail)
        assert self.place.files() == self._states["old"][0]

    def _fail(self):
        with (
            mock.patch.object(Commit, "put_in_place", side_effect=SystemRefusedError("in the end")),
            pytest.raises(SystemRefusedError, match="in the end"),
        ):
            gradtool.clip(self.folders[0], max_norm=1, write="inplace", threads=1)


@PARTS
def test_what_is_called_off_stays_so_though_a_killed_run_was_recovered_before(part):
    with contextlib.closing(CalledOff()) as scene:
        disk, struck = scene.disk.copy(), scene.each_call(part)
        for number, call in enumerate(scene.calls, 1):
            disk.do(call)
            if number not in struck:
                continue
            left = disk.copy()
            left.hour += 1
            scene.place.show(left.after(left.pending))
            calls = scene.place.record(scene.recover)
            for cut in cuts(left, calls, 4):
                scene.place.show(cut.disk)
                scene.recover()
                assert scene.state() == "old", f"kill after call {number}, {str(call)[:150]}; recovered; then {cut}"


@pytest.mark.parametrize("scene", ["clip-file-inplace", "clip-set-inplace"], indirect=True)
def test_inputs_that_were_not_on_the_disk_are_before_they_are_changed_in_place(scene):
    disk, changes = scene.disk.copy(), next(n for n, call in enumerate(scene.calls) if '"ready"' in str(call))
    for key, inode in scene.disk.inodes.items():
        # But for the index, which is not changed.
        if isinstance(inode, File) and not inode.content.startswith(b"{"):
            disk.inodes[key] = inode._replace(content=bytes(len(inode.content)))
            disk.pending.append(Op(key, "data", (0, inode.content)))
    for cut in cuts(disk, scene.calls, 6):
        if cut.calls > changes:
            scene.place.show(cut.disk)
            scene.recover()
            assert scene.state() in ("old", "new"), str(cut)
