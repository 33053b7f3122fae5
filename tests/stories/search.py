"""Search: many stories, on all cores; what fails is made smaller, printed, and kept in `found`, where it is a test.

python tests/stories/search.py --first 1 --stories 100000
python tests/stories/search.py --defects     # plants each defect of the catalogue, and counts the stories it takes
"""

import argparse
import collections
import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
_CHUNK = 50
_MOST_KEPT = 20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=1, metavar="SEED")
    parser.add_argument("--stories", type=int, default=10_000, metavar="N")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--until-found", action="store_true", help="Stop at the first that fails; keep none.")
    parser.add_argument(
        "--defects", nargs="*", metavar="NAME", help="Plant these defects, or all, and search for each."
    )
    options = parser.parse_args()
    if options.defects is not None:
        return search_defects(options)
    seeds = range(options.first, options.first + options.stories)
    return 1 if search(seeds, options.jobs, until_found=options.until_found) else 0


def search(seeds, jobs, *, until_found=False):
    """Play the stories of seeds, and return the seeds of those that fail."""
    began, calls, played, failed = time.perf_counter(), 0, 0, []
    struck, ends = collections.Counter(), collections.Counter()
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for outcome in pool.imap_unordered(_play, zip(chunks, itertools.repeat(until_found))):
            played += outcome[0]
            calls += outcome[1]
            struck += outcome[2]
            ends += outcome[3]
            for seed, text, small in outcome[4]:
                failed.append(seed)
                print(text, flush=True)
                if small and len(failed) <= _MOST_KEPT:
                    (HERE / "found").mkdir(exist_ok=True)
                    (HERE / "found" / f"{seed}.json").write_text(small)
            if failed and until_found:
                pool.terminate()
                break
    seconds = time.perf_counter() - began
    print(
        f"{played:,} stories, {calls:,} calls, {sum(struck.values()):,} strikes, {seconds:.0f} s: {len(failed)} failed"
    )
    print("strikes:", ", ".join(f"{kind} {count:,}" for kind, count in struck.most_common()))
    print("runs ended:", ", ".join(f"{kind} {count:,}" for kind, count in ends.most_common()))
    return failed


def _play(work):
    """Play the stories of some seeds: how many, their calls, what struck, how runs ended, and what failed."""
    import oracle
    import story

    seeds, until_found = work
    calls, played, failed = 0, 0, []
    struck, ends = collections.Counter(), collections.Counter()
    for seed in seeds:
        tale = story.story_of(seed)
        played += 1
        try:
            world = oracle.play(tale)
        except oracle.BrokenError as error:
            if until_found:
                failed.append((seed, f"found at seed {seed}: {str(error).splitlines()[0]}", ""))
                break
            small = oracle.smaller(tale)
            kept = story.to_json(small)
            failed.append((seed, f"{small}\n{oracle.failure_of(small)}\n{kept}\n", kept))
            continue
        calls += world.calls
        struck.update(event.kind for event in world.struck)
        ends.update(type(task.error).__name__ if task.error else "done" for task in world.tasks[: len(tale.runs)])
    return played, calls, struck, ends, failed


def search_defects(options):
    """Plant defects one by one, and print how many stories it takes to find each."""
    import mutations

    missed = []
    for mutation in mutations.PLANTED + mutations.PAST:
        if options.defects and mutation.name not in options.defects:
            continue
        with mutations.planted(mutation) as environment:
            command = [sys.executable, __file__, "--until-found", "--first", str(options.first)]
            command += ["--stories", str(options.stories), "--jobs", str(options.jobs)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        first, *rest = (done.stdout or done.stderr).splitlines()
        if done.returncode == 0:
            missed.append(mutation.name)
        count = next((line.split(" ", 1)[0] for line in rest if " stories, " in line), "?")
        print(f"{mutation.name}: {'NOT FOUND' if done.returncode == 0 else f'{first} ({count} stories)'}", flush=True)
    print("not found:", ", ".join(missed) or "none")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
