"""What setup.cfg cannot say: the text for an index of packages, and the compiled part, left out without a compiler."""

import re
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup

FOLDER = "mpidist/transport/native"


def index_page(readme):
    """Return the README without what leads to files of the repository, which an index of packages does not have."""
    relative = r"\]\((?!\w+:|#)[^)\s]*\)"
    text_and_code = re.split(r"(^ *```.*?^ *```)", readme, flags=re.MULTILINE | re.DOTALL)
    for at, text in enumerate(text_and_code[::2]):
        without_pictures = re.sub(rf"^!\[[^\]]*{relative}\n+", "", text, flags=re.MULTILINE)
        text_and_code[2 * at] = re.sub(rf"\[([^\]]*){relative}", r"\1", without_pictures)
    return "".join(text_and_code)


setup(
    long_description=index_page(Path("README.md").read_text()),
    ext_modules=[
        Extension(
            "mpidist.transport.native._native",
            sorted(glob(f"{FOLDER}/*.c")),
            depends=[f"{FOLDER}/native.h"],
            include_dirs=[numpy.get_include()],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ],
)
