"""Rules by which a parameter server updates a variable when a gradient arrives."""

from mpidist.parameter_server import rules as _rules

__all__ = ["SGD", "Adam", "Momentum", "Registered", "Rule", "register"]

SGD = _rules.SGD
Adam = _rules.Adam
Momentum = _rules.Momentum
Registered = _rules.Registered
Rule = _rules.Rule
register = _rules.register
