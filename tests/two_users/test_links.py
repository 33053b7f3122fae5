"""Links that another user leaves where somebody reads, and which of them are followed."""

import json
import os

import pytest
from neighbours import RUNNERS, folder_of, grads, told_once
from support import encode, write
from users import ALICE, MALLORY, At, as_user, run_as

from gradtool.store import links, source

INDEX = "model.safetensors.index.json"


def index(uid, path, weight_map):
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    os.chown(path, uid, uid)
    return path


def linked(root, runner):
    """A shared folder of gradients, one of them Mallory's link to a private file of the runner."""
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    grads(MALLORY, shared / "a.safetensors", seed=1)
    secret = grads(runner, private / "secret.safetensors", 0o600, seed=2)
    as_user(MALLORY, lambda: (shared / "b.safetensors").symlink_to(secret))
    return shared, secret


# What reads a folder, or an index, or one of the files there: each reads it by another way.
READERS = {
    "norm": ["norm", "shared"],
    "diff": ["diff", "shared", "shared"],
    "info": ["info", "shared"],
    "accumulate": ["accumulate", "shared", "--output", "out.safetensors"],
    "accumulate to others": ["accumulate", "shared", "--into", "mine.safetensors"],
    "shards like": ["accumulate", "mine.safetensors", "--output-dir", "out", "--shard-like", "shared"],
    "layer norms": ["layernorm-backward", "mine.safetensors", "shared"],
    "parameters": ["clip", "mine.safetensors", "--agc", "0.1", "--params", "shared"],
    "clip elsewhere": ["clip", "shared", "--max-norm", "1", "--output-dir", "out"],
    "a dry run": ["clip", "shared", "--max-norm", "1", "--dry-run"],
}


@RUNNERS
@pytest.mark.parametrize("named", ["folder", "index"])
@pytest.mark.parametrize("reader", READERS)
def test_a_link_of_another_user_in_a_folder_or_an_index_leads_to_no_private_file(root, runner, reader, named):
    shared, secret = linked(root, runner)
    grads(runner, root / "mine.safetensors", seed=1)
    os.chown(root, runner, runner)
    if named == "index":
        maps = {f"t{seed}.{k}": f"{name}.safetensors" for seed, name in ((1, "a"), (2, "b")) for k in range(2)}
        index(MALLORY, shared / INDEX, maps)
    place = shared if named == "folder" else shared / INDEX
    words = [place if word == "shared" else root / word if word.startswith(("out", "mine")) else word
             for word in READERS[reader]]  # fmt: skip
    before = sorted(root.iterdir()), secret.stat().st_atime_ns
    answer = run_as(runner, *words)
    told_once(answer, f"b.safetensors, which user {MALLORY} made, leads to a file of yours", "name that file itself")
    assert (sorted(root.iterdir()), secret.stat().st_atime_ns) == before


@RUNNERS
def test_a_link_that_is_an_index_is_not_followed_to_a_private_file(root, runner):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    grads(runner, shared / "a.safetensors")
    secret = index(runner, private / "secret.json", {"the secret": "a.safetensors"})
    as_user(MALLORY, lambda: (shared / INDEX).symlink_to(secret))
    for words in (["norm", shared], ["info", shared], ["clip", shared, "--max-norm", "1", "--dry-run"]):
        answer = run_as(runner, *words)
        told_once(answer, f"{INDEX}, which user {MALLORY} made, leads to a file of yours")
        assert "the secret" not in answer.err
    # Beside a file that is named, it is as if there were no index.
    assert run_as(runner, "norm", shared / "a.safetensors").code == 0


@RUNNERS
def test_check_reports_such_a_link_as_a_fault_and_does_not_read_it(root, runner):
    shared, secret = linked(root, runner)
    write(secret, {"the secret": encode([float("nan")], "F32")})
    answer = run_as(runner, "check", shared, "--format", "json")
    assert answer.code == 1, answer
    result = json.loads(answer.out)["data"]
    assert [(one["code"], one["file"]) for one in result["per_finding"] if one["severity"] == "fault"] == [
        ("link", str(shared / "b.safetensors"))
    ]
    assert (result["files"], result["nan"]) == (1, 0)
    assert "the secret" not in answer.out


@RUNNERS
def test_what_is_named_is_read_and_so_is_what_root_the_reader_or_the_files_owner_has_linked(root, runner):
    shared, secret = linked(root, runner)
    assert run_as(runner, "norm", shared / "b.safetensors").code == 0
    for maker, owner in ((runner, runner), (runner, MALLORY), (MALLORY, MALLORY), (0, runner), (0, MALLORY)):
        (shared / "b.safetensors").unlink()
        os.chown(secret, owner, owner)
        os.chown(secret.parent, runner, runner)
        secret.parent.chmod(0o711)
        secret.chmod(0o644)
        as_user(maker, lambda: (shared / "b.safetensors").symlink_to(secret))
        answer = run_as(runner, "norm", shared)
        assert answer.code == 0, (maker, owner, answer)
        assert "files\t2" in answer.out


def test_a_link_of_ones_own_that_leads_to_another_users_link_leads_to_no_private_file(root):
    linked(root, ALICE)
    mine = folder_of(ALICE, root / "mine", 0o755)
    as_user(ALICE, lambda: (mine / "x.safetensors").symlink_to("../shared/b.safetensors"))
    told_once(run_as(ALICE, "norm", mine), f"the link {root}/", "of yours")


@RUNNERS
@pytest.mark.parametrize("to", ["../shared/blobs/secret.safetensors", "{shared}/blobs/../private/secret.safetensors"])
def test_a_link_of_ones_own_by_way_of_another_users_folder_link_leads_to_no_private_file(root, runner, to):
    shared, secret = linked(root, runner)
    mine = folder_of(runner, root / "mine", 0o755)
    as_user(MALLORY, lambda: (shared / "blobs").symlink_to(secret.parent))
    as_user(runner, lambda: (mine / "x.safetensors").symlink_to(to.format(shared=shared)))
    told_once(
        run_as(runner, "norm", mine), f"the link {shared}/blobs, which user {MALLORY} made", f"of yours, {secret};"
    )
    assert run_as(runner, "norm", mine / "x.safetensors").code == 0


def test_a_model_cache_is_read_from_its_snapshots(root):
    cache = folder_of(ALICE, root / "cache", 0o755)
    folder_of(ALICE, cache / "blobs", 0o755)
    folder_of(ALICE, cache / "snapshots", 0o755)
    names = {f"model-{n}.safetensors": grads(ALICE, cache / f"blobs/{n}", seed=n) for n in range(2)}
    index(ALICE, cache / "blobs/index", {f"t{n}.{k}": f"model-{n}.safetensors" for n in range(2) for k in range(2)})
    for name, blob in {**names, INDEX: cache / "blobs/index"}.items():
        as_user(ALICE, lambda name=name, blob=blob: (cache / "snapshots" / name).symlink_to(f"../blobs/{blob.name}"))
    for reader in (ALICE, 0, MALLORY):
        for path in (cache / "snapshots", cache / "snapshots" / INDEX):
            answer = run_as(reader, "norm", path)
            assert answer.code == 0, answer
            assert "files\t2" in answer.out


# At the second call, the file is the link.
SWAPS = {
    "before it is opened": (source, "open_to_read", 2),
    "after it was seen to be the reader's own": (links, "foreign_links", 1),
}


@pytest.mark.parametrize("instant", SWAPS)
def test_a_link_that_takes_the_place_of_ones_own_at_the_worst_instant_is_not_followed(root, instant):
    shared, _ = linked(root, ALICE)
    (shared / "b.safetensors").rename(shared / "trap")
    grads(ALICE, shared / "blob", seed=3)
    as_user(ALICE, lambda: (shared / "b.safetensors").symlink_to("blob"))

    def attack():
        (shared / "trap").replace(shared / "b.safetensors")

    where, name, nth = SWAPS[instant]
    out = root / "out"
    os.chown(root, ALICE, ALICE)
    arguments = ["clip", shared, "--max-norm", "1", "--output-dir", out]
    answer = run_as(ALICE, *arguments, meanwhile=At(where, name, attack, nth=nth))
    # Once the link is open, it is the one that counts; what it led to is then no longer what its path leads to.
    told_once(answer, f"which user {MALLORY} made" if nth == 2 else "was changed by another program")
    assert not out.exists()
