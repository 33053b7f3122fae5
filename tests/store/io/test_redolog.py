import numpy as np
import pytest
from gradtool.store.transaction.undolog import Undo, UndoLog
from support import file_at

from gradtool import SystemRefusedError
from gradtool.store import fs
from gradtool.store.fs import Folder
from gradtool.store.system import SECTOR

KEY = "a key"


def saved(folder, path, begin, new, key=KEY):
    """An undo log of what a run overwrites with `new`."""
    home = Folder.at(folder)
    fd = home.create("log.undo")
    undo_log = UndoLog(home.file("log.undo"), fd, key, fsync=True, ahead=0)
    old = path.read_bytes()[begin : begin + len(new)]
    undo_log.keep(0, begin, memoryview(old))
    undo_log.seal(memoryview(new))
    undo_log.close()
    return Undo({0: (file_at(path), path.stat().st_size)}, [home.file("log.undo")], KEY)


def overwrite(path, begin, data):
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(data)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(np.random.default_rng(3).bytes(5_000))
    return path


# Within a sector, over its edges, from one edge to another, and nothing at all.
RANGES = [(0, 5_000), (1, 1), (37, 199), (510, 4), (511, 2_000), (512, 512), (512, 1_537), (4_999, 1), (100, 0)]


@pytest.mark.parametrize(("begin", "length"), RANGES)
def test_what_was_written_up_to_any_sector_is_ours_and_put_back(tmp_path, path, begin, length):
    old, new = path.read_bytes(), np.random.default_rng(4).bytes(length)
    undo = saved(tmp_path, path, begin, new)
    edges = [edge for edge in range(0, 5_001, SECTOR) if begin < edge < begin + length]
    for edge in (begin, *edges, begin + length):
        overwrite(path, begin, new[: edge - begin])
        assert undo.foreign() is None
        undo.put_back(fsync=True)
        assert path.read_bytes() == old


@pytest.mark.parametrize("at", [0, 1, 511, 512, 2_047, 4_999])
@pytest.mark.parametrize("done", [0, 2_048, 5_000])
def test_a_single_foreign_byte_is_seen_and_not_overwritten(tmp_path, path, at, done):
    new = np.random.default_rng(4).bytes(5_000)
    undo = saved(tmp_path, path, 0, new)
    overwrite(path, 0, new[:done])
    theirs = bytearray(path.read_bytes())
    theirs[at] ^= 1
    path.write_bytes(theirs)
    assert undo.foreign().path == path
    with pytest.raises(SystemRefusedError, match="another program wrote to it"):
        undo.put_back(fsync=True)
    assert path.read_bytes() == theirs


def test_words_that_changed_places_are_foreign(tmp_path, path):
    new = np.random.default_rng(4).bytes(5_000)
    undo = saved(tmp_path, path, 0, new)
    overwrite(path, 0, new[8:16] + new[:8] + new[16:])
    assert undo.foreign().path == path


def test_the_undo_log_of_another_run_is_not_believed(tmp_path, path):
    undo = saved(tmp_path, path, 0, b"n" * 5_000, key="another key")
    overwrite(path, 0, b"n" * 5_000)
    undo.put_back(fsync=True)
    assert path.read_bytes() == b"n" * 5_000


def test_one_target_that_fails_does_not_keep_the_others_from_being_put_back(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in "abc"]
    home = Folder.at(tmp_path)
    fd, file = home.create_file("log.undo")
    undo_log = UndoLog(file, fd, KEY, fsync=False, ahead=0)
    for number, path in enumerate(paths):
        path.write_bytes(b"old" * 300)
        undo_log.keep(number, 0, memoryview(b"old" * 300))
        undo_log.seal(memoryview(b"new" * 300))
        path.write_bytes(b"new" * 300)
    undo_log.close()
    targets = {number: (file_at(path), 900) for number, path in enumerate(paths)}
    real = fs.write_all

    def refuse(fd, parts, begin):
        if Folder.at(tmp_path).status("b").st_ino == fs.os.fstat(fd).st_ino:
            raise OSError(5, "Input/output error")
        return real(fd, parts, begin)

    monkeypatch.setattr(fs, "write_all", refuse)
    with pytest.raises(SystemRefusedError, match="b: Input/output error"):
        Undo(targets, [home.file("log.undo")], KEY).put_back(fsync=True)
    assert [path.read_bytes()[:3] for path in paths] == [b"old", b"new", b"old"]


def test_what_is_kept_counts_only_once_it_is_sealed(tmp_path, path):
    old, new = path.read_bytes(), b"n" * 5_000
    home = Folder.at(tmp_path)
    fd, file = home.create_file("log.undo")
    undo_log = UndoLog(file, fd, KEY, fsync=False, ahead=0)
    undo = Undo({0: (file_at(path), 5_000)}, [file], KEY)
    overwrite(path, 0, new)
    undo_log.keep(0, 0, memoryview(old))
    undo.put_back(fsync=False)
    assert path.read_bytes() == new
    # Another block takes the place of the one that was not sealed, of which more is left behind it.
    undo_log.keep(0, 100, memoryview(old[100:300]))
    assert undo_log.has_kept(0, 100, 200)
    assert not undo_log.has_kept(0, 0, 5_000)
    undo_log.seal(memoryview(new[100:300]))
    assert not undo_log.has_kept(0, 100, 200)
    undo_log.close()
    undo.put_back(fsync=False)
    assert path.read_bytes() == new[:100] + old[100:300] + new[300:]
