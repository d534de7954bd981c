"""What makes a variable an array: Python's operators, NumPy's functions, and what numbers can do.

They read the variable as the current context sees it, without a copy where that is this rank's memory. Nothing that
they give out is that memory: it does not change when the variable does, and writing it does not change the variable.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NoReturn

import numpy as np

from mpidist.transport import arrays

__all__ = ["ReadsAsArray"]

Operator = Callable[[Any, Any], Any]


def _forward(operate: Operator) -> Operator:
    return lambda self, other: operate(self._seen(), other)


def _reflected(operate: Operator) -> Operator:
    return lambda self, other: operate(other, self._seen())


def _refused(symbol: str) -> Operator:
    """Refuse an operator in place, which Python would else take for `v = v + x`: an array in the variable's stead."""
    method = {"+": "assign_add", "-": "assign_sub"}.get(symbol, "assign")

    def refuse(self: ReadsAsArray, other: Any) -> NoReturn:
        raise TypeError(f"variable {self.name!r} cannot be changed by {symbol}=, which knows no replicas: use {method}")

    return refuse


def _missing(name: str) -> property:
    """Make an attribute of arrays that says how to come by it. `__getattr__` would slow down all others."""

    def refuse(self: ReadsAsArray) -> NoReturn:
        raise AttributeError(f"a variable has no {name!r}: read it first, as in variable.numpy().{name}")

    return property(refuse)


def _all_three(operate: Operator, symbol: str) -> tuple[Operator, Operator, Operator]:
    return _forward(operate), _reflected(operate), _refused(symbol)


class ReadsAsArray(ABC):
    """Something with a name, a shape and a dtype that computes as a NumPy array does.

    The operators are those of the array that is seen, so that other operands (sparse matrices, say) have their say.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name, for errors."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""

    @abstractmethod
    def read_value(self) -> Any:
        """Return the value as the current context sees it: a new array."""

    @abstractmethod
    def _seen(self) -> Any:
        """Return the value as the current context sees it: an array to be read at once, and not written."""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def T(self) -> Any:  # noqa: N802 - NumPy's name
        """The value, transposed: a new array."""
        return self.read_value().T

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the value as the current context sees it, in host memory: a new array."""
        value = self.read_value()
        return arrays.to_host(value) if arrays.is_device(value) else np.asarray(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(
                f"variable {self.name!r} cannot be had as an array without a copy; its local_value() is a read-only "
                "view of this rank's copy"
            )
        return np.asarray(self.numpy(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        written = inputs[:1] if method == "at" else kwargs.get("out", ())
        for item in written:
            if isinstance(item, ReadsAsArray):
                raise TypeError(
                    f"NumPy cannot write variable {item.name!r}, as it knows no replicas: use assign, assign_add, "
                    "scatter_add, ..."
                )
        values = [item._seen() if isinstance(item, ReadsAsArray) else item for item in inputs]
        if isinstance(kwargs.get("where"), ReadsAsArray):
            kwargs["where"] = kwargs["where"]._seen()
        return getattr(ufunc, method)(*values, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        part = self._seen()[key]
        return part.copy() if getattr(part, "base", None) is not None else part

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"variable {self.name!r} cannot be written in part: use assign, scatter_update, scatter_add, ..."
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())

    def __contains__(self, item: Any) -> bool:
        return item in self._seen()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} has no len(): it has no dimensions")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self._seen())

    def __int__(self) -> int:
        return int(self._seen())

    def __index__(self) -> int:
        return operator.index(self._seen())

    def __float__(self) -> float:
        return float(self._seen())

    def __complex__(self) -> complex:
        return complex(self._seen())

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self._seen()[()], ndigits)  # arrays with dimensions are refused, as by NumPy

    def __format__(self, spec: str) -> str:
        return format(self.numpy(), spec) if spec else str(self)

    def __neg__(self) -> Any:
        return -self._seen()

    def __pos__(self) -> Any:
        return +self._seen()

    def __abs__(self) -> Any:
        return abs(self._seen())

    def __invert__(self) -> Any:
        return ~self._seen()

    __lt__ = _forward(operator.lt)
    __le__ = _forward(operator.le)
    __eq__ = _forward(operator.eq)
    __ne__ = _forward(operator.ne)
    __gt__ = _forward(operator.gt)
    __ge__ = _forward(operator.ge)
    __hash__ = object.__hash__

    __add__, __radd__, __iadd__ = _all_three(operator.add, "+")
    __sub__, __rsub__, __isub__ = _all_three(operator.sub, "-")
    __mul__, __rmul__, __imul__ = _all_three(operator.mul, "*")
    __matmul__, __rmatmul__, __imatmul__ = _all_three(operator.matmul, "@")
    __truediv__, __rtruediv__, __itruediv__ = _all_three(operator.truediv, "/")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _all_three(operator.floordiv, "//")
    __mod__, __rmod__, __imod__ = _all_three(operator.mod, "%")
    __pow__, __rpow__, __ipow__ = _all_three(operator.pow, "**")
    __lshift__, __rlshift__, __ilshift__ = _all_three(operator.lshift, "<<")
    __rshift__, __rrshift__, __irshift__ = _all_three(operator.rshift, ">>")
    __and__, __rand__, __iand__ = _all_three(operator.and_, "&")
    __xor__, __rxor__, __ixor__ = _all_three(operator.xor, "^")
    __or__, __ror__, __ior__ = _all_three(operator.or_, "|")
    __divmod__, __rdivmod__ = _forward(divmod), _reflected(divmod)


for _name in dir(np.ndarray):
    if not _name.startswith("_") and not hasattr(ReadsAsArray, _name):
        setattr(ReadsAsArray, _name, _missing(_name))
