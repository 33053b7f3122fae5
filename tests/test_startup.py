import math
import subprocess
import sys

import numpy as np
import pytest
from layers import layer
from support import write

pytestmark = pytest.mark.installed
HEAVY = ("numpy", "cupy", "rich", "safetensors", "ml_dtypes", "distributed", "dask")
# What other formats than text need.
FORMATS = tuple(f"gradtool.report.{name}" for name in ("json_output", "delimited", "github"))
PROBE = """
import sys
sys.argv = ["gradtool", *{arguments!r}]
try:
    from gradtool.cli import main
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["clip", "--help"], ["norm", "--help"], []])
def test_nothing_heavy_is_imported_to_show_help(arguments):
    code = PROBE.format(arguments=arguments, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "gradtool" in done.stdout


def test_importing_gradtool_imports_nothing_heavy():
    code = f"import sys, gradtool; gradtool.GradtoolError; print([n for n in {HEAVY!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_run_off_a_terminal_imports_no_rich(tmp_path):
    (tmp_path / "x").write_bytes((2).to_bytes(8, "little") + b"{}")
    code = PROBE.format(
        arguments=["norm", str(tmp_path / "x")],
        heavy=(
            "rich",
            "cupy",
            "ml_dtypes",
            "torch",
            "dask",
            "distributed",
            "gradtool.engines.cluster",
            *FORMATS,
        ),
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["norm", "--files-from", "list"],
        ["check", "--files-from", "list"],
        ["digest", "--files-from", "list"],
        ["info", "--files-from", "list"],
        ["diff", "a", "a"],
        ["clip", "a", "--max-norm", "1", "--output", "new", "--exclude", "b"],
        ["accumulate", "a", "--into", "buffer"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_explains_a_refusal_is_not_imported_before_one(tmp_path, arguments):
    for name in ("a", "buffer"):
        write(tmp_path / name, {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)})
    (tmp_path / "list").write_text("a\n")
    explaining = ("gradtool.store.format.filetypes", "gradtool.store.format.hints")
    code = PROBE.format(arguments=arguments, heavy=explaining)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr.endswith("[]\n")


COMMANDS = {
    "norm": ["norm", "a"],
    "norm --per-tensor": ["norm", "a", "--per-tensor", "--json"],
    "norm --histogram": ["norm", "a", "--histogram"],
    "clip": ["clip", "a", "--max-norm", "1"],
    "clip --max-value": ["clip", "a", "--max-value", "0.5"],
    "clip --agc": ["clip", "a", "--agc", "1", "--params", "b"],
    "clip elsewhere": ["clip", "a", "--max-norm", "1", "--output", "new"],
    "zero": ["zero", "a"],
    "check": ["check", "a"],
    "diff": ["diff", "a", "b"],
    "digest": ["digest", "a"],
    "info": ["info", "a"],
    "layernorm-backward": ["layernorm-backward", "layer"],
    "layernorm-backward elsewhere": ["layernorm-backward", "layer", "--output", "new", "--kind", "rmsnorm"],
}


def test_long_headers_need_no_numpy(tmp_path):
    pytest.importorskip("gradtool.backends._kernels", reason="the compiled kernels are not built here")
    write(tmp_path / "a", {f"layer.{i}.weight": np.arange(3, dtype=np.float32) for i in range(5000)})
    code = PROBE.format(arguments=["norm", "a"], heavy=["numpy"])
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stderr, done.stdout.splitlines()[0]) == ("[]\n", f"norm\t{math.sqrt(5 * 5000)!r}")


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_the_compiled_kernels_need_no_numpy(tmp_path, arguments):
    pytest.importorskip("gradtool.backends._kernels", reason="the compiled kernels are not built here")
    for name in "ab":
        write(tmp_path / name, {f"w{i}": np.arange(3, dtype=np.float32) for i in range(100)})
    write(tmp_path / "layer", layer((5, 7)))
    code = PROBE.format(arguments=arguments, heavy=["numpy"])
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr.endswith("[]\n")
