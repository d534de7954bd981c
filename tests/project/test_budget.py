"""The project stays as small as budget.cfg says."""

from configparser import ConfigParser
from pathlib import Path

import pytest
from project.budget import totals

pytestmark = pytest.mark.no_mpi


def test_budget_totals_have_not_grown():
    budget = ConfigParser()
    budget.read(Path(__file__).with_name("budget.cfg"))
    numbers = {
        (section, name): budget.getint(section, name) for section in budget.sections() for name in budget[section]
    }
    found = totals()
    assert found.keys() == numbers.keys()
    grown = [
        f"{section} {name}: {found[section, name]}"
        for section, name in found
        if found[section, name] > numbers[section, name]
    ]
    assert grown == [], "make it smaller, or raise the number in tests/project/budget.cfg and say why in the commit"
