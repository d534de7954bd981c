"""Submit a training to Slurm, with the job script that fits.

    mpidist sbatch --nodes 8 --ntasks-per-node 4 --time 02:00:00 train.py --epochs 10

The job script is train.sbatch; with --ps roles.sbatch, with --requeue requeue.sbatch, whose values are the defaults.
Other options of Slurm's sbatch come before the program, too, written --mem=64G or --exclusive. `mpidist sbatch
--write-scripts slurm` copies all job scripts, to be edited.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from mpidist.cli.launching import RefusedError, command_text, count

__all__ = ["TAKES_UNKNOWN", "add_arguments", "run"]

TAKES_UNKNOWN: Final = True  # options that are not here are those of Slurm's sbatch

_SCRIPTS: Final = Path(__file__).parents[1] / "slurm"
_ASK_SECONDS: Final = 60.0
_EARLY_SECONDS: Final = 60  # by how much at most Slurm sends a signal early
_NETWORK: Final = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--nodes", type=count, metavar="N", help="nodes of ranks")
    parser.add_argument("--ntasks-per-node", type=count, metavar="K", help="ranks per node; with GPUs one for each")
    parser.add_argument("--gpus-per-node", type=count, metavar="G", help="GPUs per node")
    parser.add_argument("--time", type=_time, metavar="T", help="how long at most, as for sbatch: 30, 02:00:00, 1-12")
    parser.add_argument("-p", "--partition", metavar="NAME", help="the partition")
    parser.add_argument("-A", "--account", metavar="NAME", help="the account that pays")
    parser.add_argument("--qos", metavar="NAME", help="the quality of service")
    parser.add_argument("--ps", type=count, metavar="P", help="parameter servers, on a node of their own")
    parser.add_argument("--requeue", action="store_true", help="continue after exit code 75, in the same job")
    parser.add_argument("--dry-run", action="store_true", help="print the command, and submit nothing")
    parser.add_argument("--write-scripts", metavar="FOLDER", help="write all job scripts there, and submit nothing")
    parser.add_argument("script", nargs="?", help="the program of all ranks")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(own_options=frozenset(parser._option_string_actions), parse=parser.parse_known_args)


def run(arguments: argparse.Namespace) -> int:
    """Submit the job, and return the exit status of sbatch."""
    while (arguments.script or "").startswith("--"):  # to argparse --job-name='my run' is no option, for its space
        arguments.unknown.append(arguments.script)
        words, arguments.script, arguments.arguments = arguments.arguments, None, []
        arguments.unknown += arguments.parse(words, arguments)[1]
    if arguments.write_scripts is not None:
        return _write_scripts(Path(arguments.write_scripts))
    command = _command(arguments)
    behind = [one for one in arguments.arguments if one.partition("=")[0] in arguments.own_options]
    if behind:
        print(
            f"mpidist sbatch: {', '.join(behind)} behind {arguments.script} goes to the program; what is meant for the "
            "job comes before the program",
            file=sys.stderr,
        )
    variables = _variables(os.environ)
    if arguments.dry_run:
        print(command_text(command, variables))
        return 0
    if shutil.which("sbatch") is None:
        raise RefusedError(
            "there is no sbatch on PATH: submit on a login node of a Slurm cluster; --dry-run prints the command"
        )
    sys.stdout.flush()
    return subprocess.run(command, env={**_without_job(os.environ), **variables}, check=False).returncode


def _command(arguments: argparse.Namespace) -> list[str]:
    short = [option for option in arguments.unknown if not option.startswith("--")]
    if short:
        raise RefusedError(f"{short[0]}: options of Slurm's sbatch are written as in --mem=64G")
    if arguments.script is None:
        raise RefusedError("needed is the program of the ranks, as in `mpidist sbatch --nodes 2 train.py`")
    if not Path(arguments.script).is_file():
        raise RefusedError(
            f"there is no file {arguments.script} in {Path.cwd()}; options come before the program, and those that "
            "mpidist sbatch does not have itself are written with a =, as in --mem=64G"
        )
    gpus, ranks = arguments.gpus_per_node, arguments.ntasks_per_node
    if gpus is not None and ranks is not None and ranks > gpus:
        raise RefusedError(f"{ranks} ranks and {gpus} GPUs per node: needed is a GPU for each rank")
    if arguments.ps is not None and arguments.requeue:
        raise RefusedError("--requeue is for ranks in lock step, and --ps for others: take one of them")
    if arguments.time is not None and arguments.requeue:
        _require_time_before_signal(arguments.time, arguments.unknown)
    per_job = [
        *_options(time=arguments.time, partition=arguments.partition, account=arguments.account, qos=arguments.qos),
        *arguments.unknown,
    ]
    command = ["sbatch", *_options(nodes=arguments.nodes, ntasks_per_node=ranks or gpus, gpus_per_node=gpus), *per_job]
    if arguments.ps is not None:
        command += [":", *_options(nodes=1, ntasks_per_node=arguments.ps), *per_job]
    name = "roles" if arguments.ps else "requeue" if arguments.requeue else "train"
    return [*command, str(_SCRIPTS / f"{name}.sbatch"), arguments.script, *arguments.arguments]


def _require_time_before_signal(time: str, options: Sequence[str]) -> None:
    """Refuse a time limit at which Slurm would send its signal while the ranks start, in each attempt."""
    given = [one for one in options if one.startswith("--signal=")]
    text = given[-1] if given else (_SCRIPTS / "requeue.sbatch").read_text().partition("#SBATCH --signal=")[2]
    number = re.match(r"[^@\s]*@(\d+)", text)
    least = _EARLY_SECONDS + (int(number[1]) if number else 60)  # Slurm's default
    limit = _seconds(time)
    if 0 < limit <= least:  # 0 is none
        raise RefusedError(
            f"--time {time} is {limit} s, and Slurm may send the signal at which the ranks save {least} s before the "
            "end: give a longer --time, or --signal=USR1@SECONDS, which must be enough for a step and a checkpoint"
        )


def _options(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those of the Slurm job of this shell, if any, which sbatch would pass on."""
    if "SLURM_JOB_ID" not in environ:
        return {**environ}
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the job script: this environment, and the type of MPI for srun."""
    variables = {}
    if sys.prefix != sys.base_prefix:
        variables["VIRTUAL_ENV"] = sys.prefix
    library = "" if environ.get("MPI_TYPE") else _answer(sys.executable, "-m", "mpi4py", "--mpi-lib-version")
    if launcher := environ.get("MPI_TYPE") or _launcher(library):
        variables["MPI_TYPE"] = launcher
    if re.search("^MPICH Device:.*ch4:.*ofi", library, re.MULTILINE):  # as env.sh does
        variables |= {name: value for name, value in _NETWORK.items() if name not in environ}
    return variables


def _launcher(library: str) -> str:
    """Return the value of `srun --mpi=`; "" where the job script must find it, as there is no MPI here."""
    if not library:
        return ""
    wanted = "pmix" if "Open MPI" in library else "cray_shasta" if "CRAY" in library else "pmi2"
    known: list[str] = re.findall(r"[\w.]+", _answer("srun", "--mpi=list"))
    if not known or wanted in known:
        return wanted
    if versions := [word for word in known if word.startswith(f"{wanted}_")]:
        return max(versions)
    raise RefusedError(
        f"the MPI library here needs `srun --mpi={wanted}`, which `srun --mpi=list` does not list: ask the site "
        "for it, take another MPI library, or choose one: MPI_TYPE=... mpidist sbatch ..."
    )


def _answer(*command: str) -> str:
    """Return the output of a command; "" if there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def _write_scripts(folder: Path) -> int:
    names = sorted(path.name for path in _SCRIPTS.iterdir())
    if there := [name for name in names if (folder / name).exists()]:
        raise RefusedError(f"{folder} has {', '.join(there)}: name another folder, as these are not overwritten")
    try:
        shutil.copytree(_SCRIPTS, folder, dirs_exist_ok=True)
    except OSError as error:
        raise RefusedError(f"the job scripts cannot be written: {error}") from None
    print(f"{folder}: {', '.join(names)}")
    return 0


def _seconds(time: str) -> int:
    """Return the seconds of a time of Slurm: minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[...]]."""
    days, is_long, rest = time.rpartition("-")
    numbers = [int(one) for one in rest.split(":")]
    if not is_long and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def _time(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time of Slurm, such as 30 (minutes), 02:00:00 or 1-12 (days-hours)"
        )
    return text
