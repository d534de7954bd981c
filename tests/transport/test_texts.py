"""Sizes and errors in few words."""

import pytest

from mpidist.transport.text import first_line, size_text, text_of, time_text

pytestmark = pytest.mark.no_mpi


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self):
        raise ValueError("no text")


def syntax_error():
    try:
        compile("1 +", "file.py", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError


def test_errors_in_one_line():
    assert text_of(KeyError("mine")) == "KeyError: 'mine'"
    assert text_of(OSError("one\ntwo")) == "OSError: one"
    inner = 'INTERNAL: error calling callback: Traceback (most recent call last):\n  File "x.py", line 1\nOSError: one'
    assert text_of(RuntimeError(inner)) == "OSError: one"
    assert text_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert text_of(syntax_error()) == "SyntaxError: invalid syntax"
    assert text_of(Mute()).endswith("Mute: <exception str() failed>")
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("it broke.\nSee there.")) == "it broke"


def test_sizes_and_times_have_the_unit_that_people_choose():
    texts = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 3 << 19: "1.5 MiB", 1 << 30: "1 GiB", 5 << 40: "5 TiB"}
    assert {size: size_text(size) for size in texts} == texts
    times = {0.0: "0 s", 3e-7: "0.3 us", 9.999e-4: "1 ms", 0.9994: "999 ms", 0.9996: "0.9996 s", 12.345: "12.35 s"}
    times |= {119.94: "119.9 s", 119.96: "2 min 0 s", 7199.0: "119 min 59 s", 7200.0: "2 h 0 min"}
    assert {seconds: time_text(seconds) for seconds in times} == times
