"""An alias of `mpidist.server_rules`."""

from mpidist.server_rules import SGD as SGD
from mpidist.server_rules import Adam as Adam
from mpidist.server_rules import Momentum as Momentum
from mpidist.server_rules import Registered as Registered
from mpidist.server_rules import Rule as Rule
from mpidist.server_rules import register as register

__all__ = ["SGD", "Adam", "Momentum", "Registered", "Rule", "register"]
