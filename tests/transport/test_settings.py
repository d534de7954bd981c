"""The `MPIDIST_` variables of the environment."""

import io
import logging
import re
from pathlib import Path

import pytest

import mpidist
from mpidist.transport.failures.flight_files import flight_folder
from mpidist.transport.mpi.launcher_abort import exit_code_file, store_code
from mpidist.transport.settings import STACK_SIGNAL, Settings, unknown_settings

pytestmark = pytest.mark.no_mpi


VALUES = [
    ("PRETEND_NODES", " 7 , -1,7 ", "pretend_nodes", (7, -1, 7)),
    ("PRETEND_NODES", "0", "pretend_nodes", (0,)),
    ("PRETEND_NODES", "  ", "pretend_nodes", None),
    ("PRETEND_CACHES", "0,0,1", "pretend_caches", (0, 0, 1)),
    ("CHECK", "1", "check", True),
    ("CHECK", " 0 ", "check", False),
    ("CHECK", "", "check", True),
    ("CHECK_VALUES", "100", "check_values", 100),
    ("CHECK_VALUES", "", "check_values", 0),
    ("FLIGHT_SIGNAL", "usr2", "flight_signal", "SIGUSR2"),
    ("FLIGHT_SIGNAL", "off", "flight_signal", None),
    ("TIMEOUT_SECONDS", "2.5", "timeout_seconds", 2.5),
    ("TIMEOUT_SECONDS", "1e3", "timeout_seconds", 1000.0),
    ("TIMEOUT_SECONDS", "inf", "timeout_seconds", None),
    ("TIMEOUT_SECONDS", "1e400", "timeout_seconds", None),
    ("TIMEOUT_SECONDS", "0", "timeout_seconds", None),
    ("TIMEOUT_SECONDS", "", "timeout_seconds", None),
    ("STALL_SECONDS", "inf", "stall_seconds", 0.0),
    ("STALL_SECONDS", "1e300", "stall_seconds", 0.0),
    ("STRAGGLER", "2", "straggler_seconds", 2.0),
    ("STRAGGLER", "0", "straggler_seconds", 0.0),
    ("ON_ERROR", "raise", "abort_on_error", False),
    ("ON_ERROR", "", "abort_on_error", True),
    ("TRANSPORT", " shared_memory ", "transport", "shared_memory"),
    ("TRANSPORT", "", "transport", "auto"),
    ("STACK_SIGNAL", "40", "stack_signal", 40),
    ("STACK_SIGNAL", "OFF", "stack_signal", None),
    ("STACK_SIGNAL", "", "stack_signal", STACK_SIGNAL),
    ("NCCL", "0", "nccl", False),
    ("NCCL", "", "nccl", True),
    ("DEVICE_MPI", "1", "device_mpi", True),
    ("DEVICE_MPI", "", "device_mpi", False),
    ("LOG", "debug", "log_level", "DEBUG"),
    ("LOG", "", "log_level", None),
    ("TRACE", " traces ", "trace", "traces"),
    ("TRACE", "", "trace", ""),
]


def test_variable_sets_its_field_alone():
    for name, text, attribute, value in VALUES:
        settings = Settings.from_environment({f"MPIDIST_{name}": text})
        assert getattr(settings, attribute) == value
        others = {key: its for key, its in vars(settings).items() if key != attribute}
        assert others == {key: its for key, its in vars(Settings()).items() if key != attribute}
    assert Settings.from_environment({"CHECK": "0", "PATH": "/bin", "MPI_CHECK": "0"}) == Settings()


WRONG = {
    "PRETEND_NODES": ("a,b", "0,,1", "0;1", "0.5,1"),
    "CHECK": ("yes", "2"),
    "CHECK_VALUES": ("-1", "often"),
    "TIMEOUT_SECONDS": ("-1", "nan", "soon"),
    "STRAGGLER": ("off",),
    "ON_ERROR": ("ignore",),
    "ALONE": ("yes",),
    "TRACEBACK": ("x",),
    "DEVICE_MPI": ("auto",),
    "TRANSPORT": ("tcp", "MPI", "shared memory"),
    "LOG": ("loud",),
    "STAGING_BYTES": ("1", "262143", "8388609", "1e6", "-5", "2MiB"),
    "RESULT_BYTES": ("all", "-1"),
}
RULES = {"STAGING_BYTES": ".*bytes, 262144 to 8388608", "RESULT_BYTES": ".*bytes, 0 or more"}


def test_variable_with_a_wrong_value_is_named():
    for name, texts in WRONG.items():
        for text in texts:
            with pytest.raises(ValueError, match=f"MPIDIST_{name}='{text}'{RULES.get(name, ' is not understood')}"):
                Settings.from_environment({f"MPIDIST_{name}": text})
    assert Settings.from_environment({"MPIDIST_STAGING_BYTES": "262144"}).staging_bytes == 262144


def test_folders_may_be_in_the_home(monkeypatch):
    """Shells do not replace `~` in what a launcher or a job script passes on."""
    monkeypatch.setenv("HOME", "/home/ada")
    assert Settings.from_environment({"MPIDIST_TRACE": "~/traces"}).trace == "/home/ada/traces"
    assert flight_folder({"MPIDIST_FLIGHT_DIR": "~/flights"}, "job") == Path("/home/ada/flights/job")
    assert flight_folder({"MPIDIST_FLIGHT_DIR": " OFF "}, "job") is None
    assert exit_code_file({"MPIDIST_EXIT_CODE_FILE": "~/code"}) == "/home/ada/code"


def test_exit_code_is_stored_once_and_a_failed_write_is_printed(tmp_path, capfd):
    for code in (3, 4):
        store_code({"MPIDIST_EXIT_CODE_FILE": f"{tmp_path}/code"}, code)
    assert ((tmp_path / "code").read_text(), capfd.readouterr().err) == ("3\n", "")
    for path, why in ((tmp_path, "it is a folder"), (tmp_path / "none" / "code", "No such file or directory")):
        store_code({"MPIDIST_EXIT_CODE_FILE": str(path)}, 3)
        assert capfd.readouterr().err == f"mpidist: MPIDIST_EXIT_CODE_FILE={path} cannot be written: {why}\n"


def test_attempts_of_a_job_of_slurm_have_folders_of_their_own():
    def name(**variables):
        folder = flight_folder({"SLURM_JOB_ID": "7", **variables}, "token")
        return "" if folder is None else folder.name

    assert [name(), name(SLURM_RESTART_COUNT="0", MPIDIST_RESTARTS="0"), name(SLURM_JOB_ID="")] == ["7", "7", "token"]
    assert [name(SLURM_RESTART_COUNT="1"), name(MPIDIST_RESTARTS="1")] == ["7-1-0", "7-0-1"]


@pytest.fixture
def logger():
    """The logger of mpidist, put back as it was."""
    ours = logging.getLogger("mpidist")
    before = ours.level, ours.handlers[:]
    ours.handlers[:] = []
    yield ours
    ours.setLevel(before[0])
    ours.handlers[:] = before[1]


def test_log_level_adds_one_handler(logger, monkeypatch):
    """Every strategy applies it."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    Settings(log_level="INFO").apply_log_level()
    Settings(log_level="INFO").apply_log_level()
    (handler,) = logger.handlers
    assert isinstance(handler, logging.StreamHandler)
    logging.getLogger("mpidist.transport").info("r0 | hello")
    logging.getLogger("mpidist.transport").debug("r0 | not this")
    assert handler.stream.getvalue() == "mpidist INFO r0 | hello\n"


def test_log_level_keeps_the_handler_of_the_user(logger):
    before = logger.level
    Settings().apply_log_level()
    assert (logger.level, logger.handlers) == (before, [])
    own = logging.NullHandler()
    logger.addHandler(own)
    Settings(log_level="WARNING").apply_log_level()
    assert logger.handlers == [own]
    assert logger.level == logging.WARNING


def test_unknown_variables_are_named_with_the_nearest_one():
    environ = {"MPIDIST_LOGG": "info", "MPIDIST_CHECK": "1", "MPIDIST_XYZZY": "", "OTHER": "1"}
    environ |= {"MPIDIST_TIMEOUT": "3", "MPIDIST_TRACE_DIR": "traces"}
    assert unknown_settings(environ) == [
        "the variable MPIDIST_LOGG means nothing; is MPIDIST_LOG meant?",
        "the variable MPIDIST_TIMEOUT means nothing; is MPIDIST_TIMEOUT_SECONDS meant?",
        "the variable MPIDIST_TRACE_DIR means nothing; is MPIDIST_TRACE meant?",
        "the variable MPIDIST_XYZZY means nothing",
    ]


def test_variables_of_the_library_are_listed_and_on_their_page():
    text = "".join(path.read_text() for path in Path(mpidist.__file__).parent.rglob("*.py"))
    (listed,) = re.findall(r"^_READ_ELSEWHERE: Final = .*$", text, re.MULTILINE)
    name = re.compile(r"\"(MPIDIST_[A-Z_]*[A-Z])\"")
    read = set(name.findall(text.replace(listed, "")))
    assert read >= set(name.findall(listed))
    assert unknown_settings(dict.fromkeys(read, "")) == []
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text()
    assert set(re.findall(r"^\| `(MPIDIST_\w+)", page, re.MULTILINE)) == read


def test_tests_and_benchmarks_read_no_variables_that_mean_nothing():
    """A strategy would warn of them. Those of the tests alone begin with TEST_."""
    root = Path(__file__).parents[2]
    texts = [path.read_text() for folder in ("tests", "benchmarks") for path in sorted((root / folder).rglob("*.py"))]
    reads = re.compile(r"environ(?:\.get\(|\.setdefault\(|\[)[\"'](MPIDIST_\w+)")
    read = {name for text in texts for name in reads.findall(text)}
    assert read >= {"MPIDIST_NCCL", "MPIDIST_CHECK", "MPIDIST_FLIGHT_DIR"}
    assert unknown_settings(dict.fromkeys(read, "")) == []
