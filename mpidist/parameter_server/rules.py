"""Rules by which a server changes a variable when a gradient arrives: SGD, momentum, Adam, and a program's own.

A worker sends a rule's name and numbers, never code. So a rule of a program is registered on all ranks, when modules
are imported::

    @server_rules.register("clip")
    def clip(value, gradient, memory, limit):
        value -= np.clip(gradient, -limit, limit)

    strategy.push(variables, gradients, server_rules.Registered("clip", 0.1))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np

from mpidist.parameter_server.messages.protocol import MAX_NUMBERS
from mpidist.transport.text import value_text

__all__ = ["SGD", "Adam", "Memory", "Momentum", "Registered", "Rule", "register", "rule_named"]

Array = np.ndarray[Any, Any]
OwnRule = Callable[..., None]
Memory = dict[str, Any]  # what a server keeps of one variable for one rule: arrays, or numbers, by name

_registered: Final[dict[str, OwnRule]] = {}


class Rule(ABC):
    """Update of a variable by a gradient.

    Args:
        numbers: The numbers sent to the servers with each gradient. Also an attribute.

    Attributes:
        name: The name of the rule on the servers.
        slots: The names of the arrays that servers keep, each of the variable's shape; of half precision, in float32.
        is_elementwise: Whether each number changes by itself, so that parts of an array can be changed one by one.
        needs_fractions: Whether steps are fractions, which whole numbers would lose.
    """

    name: str
    slots: tuple[str, ...] = ()
    is_elementwise = True
    needs_fractions = True

    def __init__(self, *numbers: float) -> None:
        if len(numbers) > MAX_NUMBERS:
            raise ValueError(f"a rule takes up to {MAX_NUMBERS} numbers, got {len(numbers)}")
        try:
            self.numbers = tuple(map(float, numbers))
        except (TypeError, ValueError):
            got = ", ".join(map(value_text, numbers))
            raise TypeError(f"{type(self).__name__} takes numbers, such as 0.1, got {got}") from None

    def require_dtype(self, variable: str, dtype: np.dtype[Any]) -> None:
        """Refuse a variable that the rule cannot change. Local.

        Raises:
            TypeError: If steps are fractions, and the variable is of whole numbers.
        """
        if self.needs_fractions and dtype.kind in "biumM":
            raise TypeError(
                f"{self.name} needs a variable of floating-point numbers, and {variable!r} is of dtype {dtype}: make "
                "it with dtype='float32', or push with 'assign_add'"
            )

    def begin(self, memory: Memory) -> None:
        """Count a gradient that arrives. On the server."""
        memory["count"] = memory.get("count", 0) + 1

    @abstractmethod
    def apply(self, value: Array, gradient: Array, memory: Memory, slots: tuple[Array, ...], *numbers: float) -> None:
        """Change numbers in place. On the server.

        Args:
            value: The variable, or a part of it.
            gradient: As many numbers, which may be overwritten.
            memory: What the server keeps of the variable.
            slots: The arrays of `slots`, or the same parts of them.
            numbers: Those that came with the gradient.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.numbers))})"


@final
class SGD(Rule):
    """`value -= learning_rate * gradient`."""

    name = "SGD"

    def __init__(self, learning_rate: float) -> None:
        super().__init__(learning_rate)

    def apply(self, value: Array, gradient: Array, memory: Memory, slots: tuple[Array, ...], *numbers: float) -> None:
        gradient *= value.dtype.type(numbers[0])
        value -= gradient


@final
class Momentum(Rule):
    """`velocity = momentum * velocity + gradient; value -= learning_rate * velocity`.

    `IndexedSlices` change only their rows, and the velocity of these.

    Args:
        learning_rate: The learning rate.
        momentum: How much of the velocity is kept.
        nesterov: Whether to step by `gradient + momentum * velocity` instead.
    """

    name = "Momentum"
    slots = ("velocity",)

    def __init__(self, learning_rate: float, momentum: float = 0.9, nesterov: bool = False) -> None:
        super().__init__(learning_rate, momentum, nesterov)

    def apply(self, value: Array, gradient: Array, memory: Memory, slots: tuple[Array, ...], *numbers: float) -> None:
        (velocity,), number = slots, slots[0].dtype.type
        velocity *= number(numbers[1])
        velocity += gradient
        step = gradient + number(numbers[1]) * velocity if numbers[2] else velocity
        value -= number(numbers[0]) * step


@final
class Adam(Rule):
    """Adam, as TensorFlow computes it: `epsilon` is the "epsilon hat" of Kingma and Ba.

    The bias is corrected by the number of gradients that have arrived from all workers. `IndexedSlices` change only
    their rows, and the averages of these: "lazy Adam", whereas TensorFlow moves all rows.
    """

    name = "Adam"
    slots = ("mean", "variance")

    def __init__(
        self, learning_rate: float = 0.001, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon)

    def apply(self, value: Array, gradient: Array, memory: Memory, slots: tuple[Array, ...], *numbers: float) -> None:
        (mean, variance), number = slots, slots[0].dtype.type
        gradient = gradient.astype(mean.dtype, copy=False)  # squares of float16 vanish, or are infinite
        rate, beta_1, beta_2, epsilon = numbers[:4]
        count = memory["count"]
        mean += number(1 - beta_1) * (gradient - mean)
        variance += number(1 - beta_2) * (gradient * gradient.conj() - variance)
        rate *= (1 - beta_2**count) ** 0.5 / (1 - beta_1**count)
        value -= number(rate) * mean / (np.sqrt(variance) + number(epsilon))


@final
class Registered(Rule):
    """A rule that the program has registered: see `register`.

    Args:
        name: The name.
        numbers: What the function gets after its first three arguments; up to `MAX_NUMBERS`.

    Raises:
        ValueError: If no function of that name was registered here.
    """

    is_elementwise = False
    needs_fractions = False

    def __init__(self, name: str, *numbers: float) -> None:
        if name not in _registered:
            known = ", ".join(sorted(_registered)) or "none"
            raise ValueError(
                f"no rule {name!r} is registered (known: {known}); register a function with this name on all ranks, at "
                "import"
            )
        super().__init__(*numbers)
        self.name = name

    def apply(self, value: Array, gradient: Array, memory: Memory, slots: tuple[Array, ...], *numbers: float) -> None:
        changed = value.copy()  # if the function raises, the variable is as it was
        returned: Any = _registered[self.name](changed, gradient.copy(), memory, *numbers)  # it may keep it
        if returned is not None and returned is not changed:
            raise TypeError(
                f"rule {self.name!r} returned {value_text(returned)}; it must change `value` in place and return None: "
                "`value -= gradient`, or `value[...] = result`"
            )
        value[...] = changed

    def __repr__(self) -> str:
        return f"Registered({', '.join(map(repr, (self.name, *self.numbers)))})"


def register(name: str) -> Callable[[OwnRule], OwnRule]:
    """Register a function as a rule, on all ranks, when modules are imported.

    The function is called on a server as `function(value, gradient, memory, *numbers)`: it changes the array `value` in
    place. `memory` is a dict that the server keeps of the variable for this rule; `memory["count"]` is the number of
    gradients so far, with this one. `IndexedSlices` arrive as an array with zeros in the other rows. A variable in
    shards is changed shard by shard, each with a memory of its own: so the norm of a gradient is that of a shard.

    Args:
        name: A name that no other rule has.

    Raises:
        TypeError: If the name is no text, or no function is registered.
        ValueError: If another rule has the name.
    """
    if not isinstance(name, str):
        raise TypeError(f'register takes a name: write @server_rules.register("clip"); got {name!r}')

    def keep(function: OwnRule) -> OwnRule:
        if isinstance(function, type) or not callable(function):
            raise TypeError(
                f"rule {name!r} must be a function of (value, gradient, memory, *numbers), got {value_text(function)}"
            )
        is_same = getattr(_registered.get(name), "__qualname__", None) == getattr(function, "__qualname__", "")
        if name in _BUILT_IN or (name in _registered and not is_same):  # a module may be imported twice
            raise ValueError(f"a rule {name!r} is registered already; choose another name")
        _registered[name] = function
        return function

    return keep


def rule_named(name: str) -> Rule:
    """Return the rule of a name, for a server."""
    made = _BUILT_IN.get(name)
    return Registered(name) if made is None else made


_BUILT_IN: Final[dict[str, Rule]] = {rule.name: rule for rule in (SGD(0.0), Momentum(0.0), Adam())}
