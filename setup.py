"""The compiled part: built where there is a C compiler, and left out where there is none."""

from glob import glob

import numpy
from setuptools import Extension, setup

FOLDER = "mpidist/transport/native"

setup(
    ext_modules=[
        Extension(
            "mpidist.transport.native._native",
            sorted(glob(f"{FOLDER}/*.c")),
            depends=[f"{FOLDER}/native.h"],
            include_dirs=[numpy.get_include()],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
