"""For which processor the numbers of a file hold."""

import platform

import pytest

from mpidist.transport.costs.cost_file import processor_in

pytestmark = pytest.mark.no_mpi

ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: {}\n\nCPU part\t: 0xfff\n"


def test_the_model_of_a_processor_has_a_name() -> None:
    text = "processor\t: 0\nmodel\t\t: 85\nmodel name\t: A Processor @ 2.00GHz\n\nmodel name\t: another\n"
    assert processor_in(text) == "A Processor @ 2.00GHz"
    assert processor_in("processor\t: 0\n") == processor_in("") == ""


def test_models_without_names_are_told_apart_by_their_numbers() -> None:
    assert processor_in(ARM.format("0xd0c")) == f"{platform.machine()} of implementer 0x41, part 0xd0c"
    assert processor_in(ARM.format("0xd4f")) != processor_in(ARM.format("0xd0c"))
