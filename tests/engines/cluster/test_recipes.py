"""The recipes of docs/cluster.md, run with the real command and real schedulers on the loopback interface."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from same_results import soon
from support import write_index

pytest.importorskip("distributed", reason="Dask is not installed; pip install '.[test-dask]'")

PAGE = Path(__file__).parents[3] / "docs/cluster.md"
NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
# Stand-ins for commands: each notes its number and its arguments. Gradtool and Dask take over the number.
STANDINS = {
    "dask": 'exec {python} -m distributed.cli.dask_"$1" "${{@:2}}"',
    "gradtool": 'exec {python} -P -m gradtool "$@"',
    # Options, and then a command. SLURM ends what does not end by itself.
    "srun": "trap 'kill -KILL $!' TERM; while [[ $1 == --* ]]; do shift; done; \"$@\" & wait; wait",
}


def recipe(beginning):
    """The script of the page that begins so."""
    (script,) = [text for text in re.findall("```bash\n(.*?)```", PAGE.read_text(), re.DOTALL) if beginning in text]
    return script


class Site:
    """A machine on which a recipe runs: /data is a folder of the test, and all networks are the loopback interface."""

    def __init__(self, folder):
        self.folder, self.data, self.bin = folder, folder / "data", folder / "bin"
        (self.data / "venv/bin").mkdir(parents=True)
        (self.data / "venv/bin/activate").touch()
        self.bin.mkdir()
        for name, action in STANDINS.items():
            note = f'echo $$ {name} "$@" >> {shlex.quote(str(folder / "calls"))}'
            script = f"#!/bin/bash\n{note}\n{action.format(python=shlex.quote(sys.executable))}\n"
            (self.bin / name).write_text(script)
            (self.bin / name).chmod(0o755)
        self.env = {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "USER": "somebody", "SLURM_JOB_ID": "17",
            "SLURM_CPUS_PER_TASK": "3", "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "false",
        }  # fmt: skip

    def run(self, script, **replacements):
        """Run a script as it is printed, but for the names of folders and networks."""
        for old, new in {"/data/": f"{self.data}/", "ib0": "lo", "eth1": "lo", "--port 8786": "--port 0"}.items():
            script = script.replace(old, new)
        for old, new in replacements.items():
            assert old in script
            script = script.replace(old, new)
        path = self.folder / "script"
        path.write_text(script)
        subprocess.run(["bash", "-n", path], check=True)
        # To files, which nobody waits for that a process left behind keeps open.
        with (self.folder / "out").open("w+") as out, (self.folder / "err").open("w+") as err:
            done = subprocess.run(
                ["bash", path], check=False, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=120,
                cwd=self.folder, env=os.environ | self.env,
            )  # fmt: skip
        return done.returncode, (self.folder / "out").read_text(), (self.folder / "err").read_text()

    @property
    def calls(self):
        """The commands that were called, by number."""
        calls = (line.split() for line in (self.folder / "calls").read_text().splitlines())
        return [(int(number), *arguments) for number, *arguments in calls]

    def is_over(self):
        """Whether nothing runs any more; what has ended may wait for its parent, which is not the script."""
        return all(has_ended(number) for number, *_ in self.calls)


def has_ended(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def gradients(folder, value=2.0):
    write_index(folder, {f"{i}.safetensors": {f"t{i}": np.full(4, value, np.float32)} for i in range(2)})


@pytest.mark.parametrize(("value", "code"), [(2.0, 0), (np.nan, 1)])
def test_the_recipe_for_slurm_clips_and_leaves_nothing_running_even_after_a_failure(site, value, code):
    gradients(site.data / "step_100", value)
    script = recipe("#SBATCH")
    assert "#SBATCH --mem=" in script
    returncode, out, err = site.run(script)
    assert returncode == code, err
    assert ("clipped\tyes\n" in out) == (code == 0)
    (step,) = [arguments for _, name, *arguments in site.calls if name == "srun"]
    folder = site.data / "somebody/dask-17"
    assert step[:5] == ["--cpus-per-task=3", f"--output={folder}/worker-%t.log", "dask", "worker", "--scheduler-file"]
    (command,) = [arguments for _, name, *arguments in site.calls if name == "gradtool"]
    assert command[command.index("--threads") + 1] == "3"
    assert soon(site.is_over), site.calls
    assert "Scheduler at:" in (folder / "scheduler.log").read_text()
    assert [path.name for path in folder.iterdir()] == ["scheduler.log"]


CERTIFICATE, CLUSTER = "openssl req", "--protocol tls"


@NEEDS_OPENSSL
def test_the_recipe_for_tls_runs_with_certificates(site):
    gradients(site.data / "step_100")
    code, _, err = site.run(recipe(CERTIFICATE))
    assert code == 0, err
    tls = site.data / "somebody/tls"
    assert (tls.stat().st_mode & 0o777, (tls / "key.pem").stat().st_mode & 0o077) == (0o700, 0)
    # The address in the scheduler's file, too.
    address = '$(sed -n \'s/.*"address": "\\(.*\\)",.*/\\1/p\' "$file")'
    command = 'gradtool norm /data/step_100 --engine "dask:$file"'.replace("/data/", f"{site.data}/")
    by_address = f'{command} --worker-timeout 60\naddress={address}\necho "$address"\n'
    by_address += command.replace("$file", "$address") + " --worker-timeout 60"
    code, out, err = site.run(recipe(CLUSTER), **{command: by_address})
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("norm\t")] == ["norm\t5.656854249492381"] * 2
    assert re.search(r"^tls://127\.0\.0\.1:\d+$", out, re.MULTILINE)
    assert soon(site.is_over), site.calls
    assert not (tls / "scheduler.json").exists()


@NEEDS_OPENSSL
@pytest.mark.parametrize("lacks", ["a certificate", "the same certificate"])
def test_a_command_without_the_certificate_is_refused(site, lacks):
    gradients(site.data / "step_100")
    assert site.run(recipe(CERTIFICATE))[0] == 0
    other = 'unset "${!DASK_DISTRIBUTED__COMM__TLS__@}"\n'
    if lacks != "a certificate":
        other = (
            "export DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT=$PWD/c DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY=$PWD/k\n"
        )
        other += "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -keyout k -out c\n"
    command = "gradtool norm"
    code, out, err = site.run(recipe(CLUSTER), **{command: f"{other}{command}"})
    assert (code, "norm\t" in out, err.count("gradtool: error: ")) == (5, False, 1)
    assert "does not answer: " in err
    assert soon(site.is_over), site.calls
