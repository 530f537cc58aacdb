"""The compiled part: a library without Python in it, called through ctypes. What it does can be done without it."""

from pathlib import Path

from setuptools import Extension, setup

sources = sorted(str(path) for path in Path("lightning_pipe/recsys/kernels/csrc").glob("*.cpp"))
setup(
    ext_modules=[
        Extension(
            # Next to its sources, because it is not a Python module.
            "lightning_pipe.recsys.kernels.csrc._native",
            sources,
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-strict-aliasing"],
            # Without a compiler, the package is installed without this library.
            optional=True,
        )
    ]
)
