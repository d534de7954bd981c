"""Whether hosts can be made out of namespaces here."""

import pytest
from hosts import Hosts

__all__ = ["need_hosts"]


def need_hosts():
    lack = Hosts.missing()
    if lack:
        pytest.skip(f"needs a mount namespace and others, and links between them: {lack}")
