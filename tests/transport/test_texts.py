"""Sizes and errors in few words."""

import pytest

from mpidist.transport.text import first_line, size_text, text_of

pytestmark = pytest.mark.no_mpi


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


def syntax_error() -> SyntaxError:
    try:
        compile("1 +", "file.py", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError


def test_errors_in_one_line() -> None:
    assert text_of(KeyError("mine")) == "KeyError: 'mine'"
    assert text_of(OSError("one\ntwo")) == "OSError: one"
    assert text_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert text_of(syntax_error()) == "SyntaxError: invalid syntax"
    assert text_of(Mute()).endswith("Mute: <exception str() failed>")
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("it broke.\nSee there.")) == "it broke"


def test_sizes_have_the_unit_that_people_choose() -> None:
    texts = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 3 << 19: "1.5 MiB", 1 << 30: "1 GiB", 5 << 40: "5 TiB"}
    assert {size: size_text(size) for size in texts} == texts
