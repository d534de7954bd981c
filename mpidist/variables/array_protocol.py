"""A variable as an operand: Python's operators, NumPy's functions, conversions to numbers.

They read the variable's value in the current context, where possible without a copy. Their results never share memory
with the variable: writing a result does not change the variable, nor the other way round.

A variable in device memory is an operand of CuPy. Beside an array of NumPy, and where NumPy reduces it, a copy in host
memory takes its place, and the result is NumPy's.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from mpidist.transport import arrays
from mpidist.transport.array_libraries.jax_arrays import is_compiled

__all__ = ["ReadsAsArray"]

Operator = Callable[[Any, Any], Any]
_T = TypeVar("_T")


def _read_by(convert: Callable[[Any], _T]) -> Callable[[Any], _T]:
    return lambda self: convert(self._read_view())


def _forward(operate: Operator) -> Operator:
    def apply(self: ReadsAsArray, other: Any) -> Any:
        view = self._read_view()
        if type(view) is not np.ndarray:
            view, other = _together(view, other)
        if type(other) is not np.ndarray and is_compiled(other):
            raise TypeError(
                f"variable {self.name!r} in a function that JAX compiles would be a constant, with its value of now: "
                "pass read_value() of it to the function"
            )
        return operate(view, other)

    return apply


def _reflected(operate: Operator) -> Operator:
    return _forward(lambda own, other: operate(other, own))


def _together(view: Any, other: Any) -> tuple[Any, Any]:
    """Return a variable's value and the other operand such that one library takes both: CuPy takes none of NumPy's."""
    if isinstance(other, ReadsAsArray):
        other = other._read_view()
    if isinstance(other, (np.ndarray, list, tuple)) and arrays.is_device(view):
        return arrays.to_host(view), other
    return view, other


def _refuse_in_place(symbol: str) -> Operator:
    """Make a method that refuses `v += x`. Without one Python would bind `v` to an array, the result of `v + x`."""
    method = {"+": "assign_add", "-": "assign_sub"}.get(symbol, "assign")

    def refuse(self: ReadsAsArray, other: Any) -> NoReturn:
        what = f"variable {self.name!r} cannot be changed by {symbol}="
        raise TypeError(f"{what}, which ignores other replicas: use {method}")

    return refuse


def _refuse_attribute(name: str) -> property:
    """Make a property whose `AttributeError` locates the attribute. `__getattr__` would slow down all others."""

    def refuse(self: ReadsAsArray) -> NoReturn:
        raise AttributeError(f"a variable has no {name!r}: read it first, as in variable.numpy().{name}")

    return property(refuse)


def _operators(operate: Operator, symbol: str) -> tuple[Operator, Operator, Operator]:
    return _forward(operate), _reflected(operate), _refuse_in_place(symbol)


_power: Final = _forward(operator.pow)


class ReadsAsArray(ABC):
    """An object with a name, a shape and a dtype that is an operand like a NumPy array.

    Operators are called on the array, so that Python also asks the other operand's class, a sparse matrix, say.
    """

    _name: str
    _suffix = ""  # of `StrategyParts.variable_suffix`
    _like: Any  # an array of the same shape and dtype

    @property
    def name(self) -> str:
        """The name, the same on every rank."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        shape: tuple[int, ...] = self._like.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        dtype: np.dtype[Any] = self._like.dtype
        return dtype

    @abstractmethod
    def read_value(self) -> Any:
        """Return the value in the current context: a new array."""

    def value(self) -> Any:
        """Return the value in the current context: `read_value`."""
        return self.read_value()

    def _read_view(self) -> Any:
        """Return the value in the current context: an array to be read at once, and not written."""
        return self.read_value()

    @property
    def _what(self) -> str:
        """What errors call it, and ranks compare."""
        return f"variable {self._name!r}{self._suffix}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._what} cannot be copied or pickled: it belongs to its strategy; read its value, as with numpy()"
        )

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
        """Return the value in the current context, in host memory: a new array."""
        return arrays.on_host(self.read_value())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(
                f"variable {self.name!r} cannot become an array without a copy; its local_value() is a read-only "
                "view of this rank's copy"
            )
        return np.asarray(self.numpy(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        written = inputs[:1] if method == "at" else kwargs.get("out", ())
        for item in written:
            if isinstance(item, ReadsAsArray):
                raise TypeError(
                    f"NumPy cannot write variable {item.name!r}, as it ignores other replicas: use assign, assign_add, "
                    "scatter_add, ..."
                )
        values, on_device = list(inputs), []
        for at, item in enumerate(inputs):
            if isinstance(item, ReadsAsArray):
                values[at] = item._read_view()
                if arrays.is_device(values[at]):
                    on_device.append(at)
        if isinstance(kwargs.get("where"), ReadsAsArray):
            kwargs["where"] = kwargs["where"].numpy()
        given = [*values, *kwargs.values(), *(kwargs.get("out") or ())]
        if on_device and (method != "__call__" or any(isinstance(one, np.ndarray) for one in given)):
            for at in on_device:
                values[at] = arrays.to_host(values[at])
        return getattr(ufunc, method)(*values, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        part = self._read_view()[key]
        return part.copy() if getattr(part, "base", None) is not None else part

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"variable {self.name!r} cannot be written in part: use assign, scatter_update, scatter_add, ..."
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())

    def __contains__(self, item: Any) -> bool:
        return item in self._read_view()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} has no len(): it has no dimensions")
        return self.shape[0]

    def __index__(self) -> int:
        return operator.index(arrays.on_host(self._read_view()))

    def __round__(self, ndigits: int | None = None) -> Any:
        number: Any = self.numpy()[()]
        return round(number, ndigits)  # arrays with dimensions are refused, as by NumPy

    def __format__(self, spec: str) -> str:
        return format(self.numpy(), spec) if spec else str(self)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if modulus is not None:
            raise TypeError(f"pow() with a modulus takes integers, got variable {self.name!r}: pass int(variable)")
        return _power(self, other)

    __bool__, __int__ = _read_by(bool), _read_by(int)
    __float__, __complex__ = _read_by(float), _read_by(complex)
    __neg__, __pos__ = _read_by(operator.neg), _read_by(operator.pos)
    __abs__, __invert__ = _read_by(abs), _read_by(operator.invert)

    __lt__ = _forward(operator.lt)
    __le__ = _forward(operator.le)
    __eq__ = _forward(operator.eq)
    __ne__ = _forward(operator.ne)
    __gt__ = _forward(operator.gt)
    __ge__ = _forward(operator.ge)
    __hash__ = object.__hash__

    __add__, __radd__, __iadd__ = _operators(operator.add, "+")
    __sub__, __rsub__, __isub__ = _operators(operator.sub, "-")
    __mul__, __rmul__, __imul__ = _operators(operator.mul, "*")
    __matmul__, __rmatmul__, __imatmul__ = _operators(operator.matmul, "@")
    __truediv__, __rtruediv__, __itruediv__ = _operators(operator.truediv, "/")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _operators(operator.floordiv, "//")
    __mod__, __rmod__, __imod__ = _operators(operator.mod, "%")
    __rpow__, __ipow__ = _reflected(operator.pow), _refuse_in_place("**")
    __lshift__, __rlshift__, __ilshift__ = _operators(operator.lshift, "<<")
    __rshift__, __rrshift__, __irshift__ = _operators(operator.rshift, ">>")
    __and__, __rand__, __iand__ = _operators(operator.and_, "&")
    __xor__, __rxor__, __ixor__ = _operators(operator.xor, "^")
    __or__, __ror__, __ior__ = _operators(operator.or_, "|")
    __divmod__, __rdivmod__ = _forward(divmod), _reflected(divmod)


for _name in dir(np.ndarray):
    if not _name.startswith("_") and not hasattr(ReadsAsArray, _name):
        setattr(ReadsAsArray, _name, _refuse_attribute(_name))
