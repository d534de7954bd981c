"""Tensors of PyTorch as native arrays, and back: the same memory in every dtype, or a clear refusal."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

import mpidist
from mpidist.transport.array_libraries.libraries import copied, library_of, writable_like

pytestmark = pytest.mark.no_mpi

LOW = [name for name in dir(ml_dtypes) if name == "bfloat16" or name.startswith("float8")]
OF_ML_DTYPES = [name for name in LOW if hasattr(torch, name)]
OF_NUMPY = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64",
            "bool", "complex64", "complex128"]  # fmt: skip


def native(value):
    return library_of(value).to_native(value)


def address(array):
    return int(array.__array_interface__["data"][0])


def test_there_are_dtypes_of_ml_dtypes():
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2"} <= set(OF_ML_DTYPES)


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("name", OF_NUMPY + OF_ML_DTYPES)
def test_torch_dtypes_are_viewed_both_ways(name, shape):
    tensor = torch.ones(shape).to(getattr(torch, name))
    array = native(tensor)
    assert (array.dtype.name, array.shape) == (name, shape)
    assert (array == np.ones(shape, array.dtype)).all()
    assert not array.size or address(array) == tensor.data_ptr()
    result = array.copy()
    again = library_of(tensor).from_native(result, tensor)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert not result.size or again.data_ptr() == address(result)
    assert copied(tensor).dtype == tensor.dtype
    assert type(again) is torch.Tensor


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2"])
def test_tensor_part_is_viewed_in_place(name):
    tensor = torch.arange(12.0).reshape(3, 4).to(getattr(torch, name)).t()[::2]
    array = native(tensor)
    assert (address(array), array.strides) == (tensor.data_ptr(), tuple(s * tensor.itemsize for s in tensor.stride()))
    assert array.astype(np.float32).tolist() == [[0, 4, 8], [2, 6, 10]]
    array[0, 1] = 7
    assert tensor.float().tolist() == [[0, 7, 8], [2, 6, 10]]


def test_parameters_are_their_numbers():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert address(native(parameter)) == parameter.data_ptr()
    assert address(library_of(parameter).to_target(parameter)) == parameter.data_ptr()
    again = copied(parameter)
    assert type(again) is torch.Tensor
    assert not again.requires_grad


def test_tensor_with_a_gradient_is_viewed_under_no_grad_alone():
    loss = torch.nn.Linear(2, 1)(torch.ones(2)).sum()
    with pytest.raises(TypeError, match=r"PyTorch differentiates \(SumBackward0\).*pass tensor.detach\(\)"):
        native(loss)
    with torch.no_grad():
        assert native(loss).shape == ()
    assert native(loss.detach()).shape == ()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(2).to_sparse(), r"layout is torch.sparse_coo.*pass tensor.to_dense\(\)"),
        (lambda: torch.ones(2, device="meta"), r"on device meta.*pass tensor.cpu\(\)"),
        (lambda: torch.ones(2, dtype=torch.complex32), "complex32 has no view of NumPy"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensor_without_a_view_is_refused(make, text):
    with pytest.raises(TypeError, match=text):
        native(make())


def test_conjugated_numbers_are_read_and_not_written():
    tensor = torch.tensor([1 + 2j]).conj()
    assert native(tensor).tolist() == [1 - 2j]
    assert native(tensor.imag).tolist() == [-2]
    for lazy in (tensor, tensor.imag):
        with pytest.raises(TypeError, match="conjugated or negated as they are read: clone it"):
            library_of(lazy).to_target(lazy)
    tensor.resolve_conj()[0] = 3  # of a copy
    assert native(tensor).tolist() == [1 - 2j]
    torch.view_as_real(tensor.conj())[0, 0] = 5
    assert native(tensor).tolist() == [5 - 2j]


def test_tensor_native_array_is_cached_while_valid():
    tensor = torch.arange(4.0).reshape(2, 2)
    first = native(tensor)
    assert native(tensor) is first
    tensor.add_(1)
    assert first.tolist() == [[1, 2], [3, 4]]
    assert native(tensor) is first
    tensor.t_()
    assert native(tensor).tolist() == [[1, 3], [2, 4]]
    tensor.data = torch.zeros(2, 2)
    assert address(native(tensor)) == tensor.data_ptr()
    assert native(tensor).tolist() == [[0, 0], [0, 0]]
    tensor.data = torch.ones(2, 2)  # of the same form, elsewhere
    assert native(tensor).tolist() == [[1, 1], [1, 1]]
    tensor.data = tensor.data.view(torch.int32)  # at the same place
    assert native(tensor).dtype.name == "int32"
    tensor.data = torch.zeros(3)
    assert native(tensor).shape == (3,)


def test_dataset_of_samples_is_no_data_set_of_batches():
    samples = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(2, 4))
    strategy = mpidist.get_strategy()
    with pytest.raises(TypeError, match="a TensorDataset has items; pass a DataLoader of it"):
        strategy.experimental_distribute_dataset(samples)
    for batches in (torch.utils.data.DataLoader(samples, 2), torch.utils.data.ChainDataset([])):
        strategy.experimental_distribute_dataset(batches)


def test_tensor_is_not_kept_by_its_native_array():
    tensor = torch.ones(5)
    array = native(tensor)
    gone, memory = weakref.ref(tensor), weakref.ref(array)
    del tensor, array
    gc.collect()
    assert gone() is None
    assert memory() is None


def test_writable_memory_becomes_a_tensor():
    for like in (torch.ones(3, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(3))):
        memory = np.zeros(3, native(like).dtype)
        made = writable_like(like, memory)
        assert type(made) is torch.Tensor
        assert (made.dtype, made.data_ptr(), made.requires_grad) == (like.dtype, address(memory), False)
