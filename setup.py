"""The part of the build that pyproject.toml cannot say: the compiled kernels, which are optional."""

from setuptools import Extension, setup

# No fused multiply-add (it rounds once where the contract rounds twice); the other two only free the vectoriser from
# floating-point flags and errno, which nobody reads.
EXACT = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]

setup(
    ext_modules=[
        Extension(
            "gradtool.backends._kernels",
            sources=[f"gradtool/backends/{name}.c" for name in ("_kernels", "_level_v3", "_level_v4")],
            # Rebuilt when one of these changes, and shipped with the source.
            depends=[
                f"gradtool/backends/{name}.h"
                for name in (
                    "_codes",
                    "_half",
                    "_layer_norm",
                    "_level",
                    "_order",
                    "_processor",
                    "_storage",
                    "_sums",
                    "_tiles",
                )
            ],
            extra_compile_args=EXACT,
            py_limited_api=True,
            # Without a compiler the install goes on, and the numpy backend gives the same bits more slowly.
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
