import subprocess
import sys

import numpy as np
import pytest
from support import gradtool, gradtool_json, snapshot, write

from gradtool import BackendUnavailableError, UsageError
from gradtool.backends.choose import choose

WITHOUT_KERNELS = """
import sys
sys.modules["gradtool.backends._kernels"] = None
from gradtool.backends.choose import choose
choice = choose("auto")
print(type(choice.backend).__name__, choice.backend.name, choice.why)
"""


def test_auto_and_cpu_take_the_cpu_and_say_why():
    for name in ("auto", "cpu"):
        choice = choose(name)
        assert choice.backend.name == "cpu"
        assert choice.why


def test_without_compiled_kernels_numpy_does_the_work_and_says_so():
    done = subprocess.run([sys.executable, "-c", WITHOUT_KERNELS], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("NumpyBackend cpu numpy, because the compiled kernels are missing: ")


def test_the_environment_selects_numpy_in_place_of_the_compiled_kernels(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"a": np.array([3, 4], np.float32)})
    why = "numpy, because of GRADTOOL_KERNELS=numpy"
    data = gradtool_json("norm", path, env={"GRADTOOL_KERNELS": "NumPy"})["data"]
    assert (data["norm"], data["backend"], data["warnings"]) == (5.0, "cpu", [])
    assert data["backend_why"] == f"{why}; auto leaves GPUs to --backend cuda"
    data = gradtool_json("doctor", tmp_path, env={"GRADTOOL_KERNELS": "numpy"})["data"]
    assert (data["cpu_backend"], data["settings"]) == (why, "GRADTOOL_KERNELS=numpy")
    assert "slow" not in {warning["code"] for warning in data["warnings"]}
    done = gradtool("norm", path, env={"GRADTOOL_KERNELS": "c"})
    assert (done.returncode, done.stderr) == (
        2,
        "gradtool: error: GRADTOOL_KERNELS must be numpy, required or empty, not 'c'\n",
    )
    kinds = set()
    for value in ("", "required"):
        monkeypatch.setenv("GRADTOOL_KERNELS", value)
        kinds.add(type(choose("cpu").backend))
    assert len(kinds) == 1


def test_an_explicit_backend_that_is_missing_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailableError, match="gradtool") as caught:
        choose("cuda")
    assert caught.value.exit_code == 4


def test_the_environment_names_the_backend_where_no_argument_does(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setenv("GRADTOOL_BACKEND", "cuda")
    with pytest.raises(BackendUnavailableError):
        choose()
    assert choose("cpu").backend.name == choose("auto").backend.name == "cpu"
    monkeypatch.setenv("GRADTOOL_BACKEND", "CPU")
    assert choose().backend.name == "cpu"
    monkeypatch.setenv("GRADTOOL_BACKEND", "")
    assert choose().backend.name == "cpu"
    monkeypatch.setenv("GRADTOOL_BACKEND", "tpu")
    with pytest.raises(UsageError, match="GRADTOOL_BACKEND.*tpu"):
        choose()


@pytest.mark.parametrize("name", [None, "auto", "cpu"])
def test_a_device_needs_the_backend_that_has_devices(name, monkeypatch):
    monkeypatch.delenv("GRADTOOL_BACKEND", raising=False)
    with pytest.raises(UsageError, match='device requires backend="cuda"'):
        choose(name, 1)


def test_auto_says_that_it_leaves_gpus_alone(monkeypatch):
    monkeypatch.delenv("GRADTOOL_BACKEND", raising=False)
    assert choose().why.endswith('auto leaves GPUs to backend="cuda"')
    assert "cuda" not in choose("cpu").why


def test_a_run_on_the_cpu_imports_no_cupy(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": np.ones(3, np.float32)})
    code = f"import sys, gradtool; gradtool.clip({str(path)!r}, max_norm=1.0); print('cupy' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("operation", ["norm", "clip", "accumulate", "zero", "layernorm-backward"])
def test_a_missing_gpu_ends_every_command_with_4_and_one_line(tmp_path, operation):
    path = write(tmp_path / "x.safetensors", {"a": np.ones(3, np.float32)})
    before = snapshot(tmp_path)
    options = {"clip": ["--max-norm", "1"], "accumulate": ["--into", path]}.get(operation, [])
    # Modules that cannot be imported hide a CuPy that is installed.
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise ImportError('not for this test')")
    environment = {"PYTHONPATH": str(tmp_path), "GRADTOOL_BACKEND": "cuda"}
    done = gradtool(operation, path, *options, env=environment)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("gradtool: ") == 1
    assert "gradtool[cuda12]" in done.stderr
    answer = gradtool_json(operation, path, *options, "--device", "3", env=environment)
    assert [error["code"] for error in answer["errors"]] == ["backend"]
    assert {path: before[path] for path in before} == {path: snapshot(tmp_path)[path] for path in before}


def test_an_unknown_backend_is_a_usage_error():
    with pytest.raises(UsageError, match="tpu"):
        choose("tpu")
