"""What pyproject.toml cannot say of the build: the compiled kernels, which are optional, and absolute links."""

import os
import re
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
# No fused multiply-add (it rounds once where the contract rounds twice); the next two only free the vectoriser from
# floating-point flags and errno, which nobody reads. Debug information would be most of a wheel.
EXACT = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-g0"]
# One build for all versions of Python from 3.11 on; free-threaded ones have no stable ABI.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")


def description() -> str:
    """The README; outside the repository, its links to other files need the address of the repository."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{repository}/raw/main/", readme)
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({repository}/blob/main/", readme)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "gradtool.backends._kernels",
            sources=[f"gradtool/backends/{name}.c" for name in ("_kernels", "_level_v3", "_level_v4", "_level_v4_512")],
            # Rebuilt when one of these changes, and shipped with the source.
            depends=[
                f"gradtool/backends/{name}.h"
                for name in (
                    *("_base", "_codes", "_difference_codes", "_difference_rows", "_differences", "_extremes", "_half"),
                    *("_histogram", "_lanes", "_layer_norm", "_level", "_losses", "_order", "_processor"),
                    *("_scaling", "_short_rows", "_source", "_storage", "_sums", "_terms", "_tiles", "_units"),
                )
            ],
            define_macros=[("Py_LIMITED_API", "0x030b0000")] if STABLE else [],
            extra_compile_args=EXACT,
            py_limited_api=STABLE,
            # Without a compiler the install goes on, and the numpy backend gives the same bits more slowly. A wheel
            # that is published must have the kernels, so its build sets this.
            optional=os.environ.get("GRADTOOL_KERNELS") != "required",
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
