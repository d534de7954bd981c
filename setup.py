"""The compiled part: built where there is a C compiler, and left out where there is none."""

import numpy
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mpidist.transport.native._native",
            ["mpidist/transport/native/_native.c"],
            include_dirs=[numpy.get_include()],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
