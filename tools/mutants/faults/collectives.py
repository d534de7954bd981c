"""Seeded faults of the collectives."""

from fault import Fault

TESTS = ["tests/collectives", "tests/cross_device_ops"]
FAULTS = [
    Fault(
        "plans/rows_execution.py",
        "results[index][...] = part if row_list.divide_by == 1 else part / row_list.divide_by",
        "results[index][...] = part",
        "a mean of replicas in rows is a sum",
    ),
    Fault(
        "plans/rows_execution.py",
        "return [result if wanted else None for result, wanted in zip(results, self._is_wanted, strict=True)]",
        "return results",
        "ranks that are no destination get a result",
    ),
    Fault(
        "plans/repeated_reductions.py",
        "starts.append(-(-end // alignment) * alignment)",
        "starts.append(0)",
        "small lists of two dtypes overwrite each other",
    ),
    Fault(
        "plans/repeated_reductions.py",
        "total, fused.divide_by if keeps else 1)",
        "total, 1)",
        "means of small arrays are sums",
    ),
    Fault(
        "plans/arithmetic.py",
        "if dtype.itemsize <= 2:",
        "if dtype.itemsize <= 4:",
        "means of int32 are float32",
    ),
    Fault(
        "plans/arithmetic.py",
        "return Reduction(name, divisor, self.in_rank_order, counts_overflow=is_compressed), 1",
        "return Reduction(name, 1, self.in_rank_order, counts_overflow=is_compressed), divisor",
        "means of float16 overflow before they are divided",
    ),
    Fault(
        "plans/arithmetic.py",
        "return plain  # nothing leaves the node",
        "pass",
        "compression rounds what stays within a node",
    ),
    Fault(
        "plans/arithmetic.py",
        '        if dtype.kind == "c":\n            raise',
        "        if False:\n            raise",
        "a minimum of complex numbers is accepted",
    ),
    Fault(
        "plans/arithmetic.py",
        "        if self._calls & (self._calls - 1) == 0:",
        "        if False:",
        "numbers that overflow float16 are not told",
    ),
    Fault(
        "plans/fused_results.py",
        "views.append(whole[at : at + length].reshape(shape))\n            at += length",
        "views.append(whole[at : at + length].reshape(shape))",
        "the results of a list are all the first one's numbers",
    ),
    Fault(
        "plans/repeated_reductions.py",
        "return bool(native.have_forms(arrays, self._forms, need_own_data, False))",
        "return True",
        "a list of other shapes is taken for the one before",
    ),
    Fault(
        "plans/local_sums.py",
        "if other.key == first.key or other.specs == first.specs:",
        "if True:",
        "replicas of a rank that pass other shapes are not found",
    ),
    Fault(
        "plans/local_sums.py",
        "if options.compression is not Compression.NONE:\n        what",
        "if False:\n        what",
        "compression with chosen replicas is ignored in silence",
    ),
    Fault(
        "plans/plan.py",
        "        if held > bytes_per_pack:\n",
        "        if held >= bytes_per_pack:\n",
        "bytes_per_pack closes packs too early",
    ),
    Fault(
        "plans/plan.py",
        "return None  # a partial sum must not be rounded between nodes",
        "pass",
        "reproducible float16 sums depend on the nodes",
    ),
    Fault(
        "plans/plan.py",
        "for index in reversed(range(len(specs))):",
        "for index in range(len(specs)):",
        "arrays are packed in the other order",
    ),
    Fault(
        "plans/places.py",
        "return same or not {source.window for source in sources} & {out.window for out in outs}",
        "return True",
        "results overwrite values that other ranks still read",
    ),
    Fault(
        "plans/packed_execution.py",
        "arrays = copy_overwritten(arrays, targets)",
        "pass",
        "an out that is another value is overwritten too early",
    ),
    Fault(
        "plans/packed_execution.py",
        "        flat /= message.divide_by",
        "        pass",
        "means of large arrays are sums",
    ),
    Fault(
        "plans/packed_execution.py",
        "into[...] = part if message.divide_by == 1 else part / message.divide_by",
        "into[...] = part",
        "means of packed arrays are sums",
    ),
    Fault(
        "repeated_calls.py",
        "_SMALL_INTS: Final = range(-1 << 31, 1 << 31)",
        "_SMALL_INTS: Final = range(-1 << 63, 1 << 63)",
        "a sum of large Python ints overflows where small ones were reduced before",
    ),
    Fault(
        "repeated_calls.py",
        "if self._cached_for is not self._group.levels or value is None:",
        "if value is None:",
        "repeated calls after a reset use what it has freed",
    ),
    Fault(
        "reductions.py",
        "        call.fingerprint ^= checked.per_node_digest",
        "        pass",
        "a per-node out on some ranks alone is not found",
    ),
    Fault(
        "reductions.py",
        "call.fingerprint = plan.fingerprint ^ name_digest(call.name)",
        "call.fingerprint = plan.fingerprint",
        "different calls of equal arrays are taken for one",
    ),
    Fault(
        "reductions.py",
        "call.error = name_call(problem, call.name)\n\n    def _describe",
        "raise\n\n    def _describe",
        "a mistake on one rank leaves the others waiting",
    ),
    Fault(
        "all_gather.py",
        "if not are_equal or memory is None:",
        "if memory is None:",
        "a gather of unequal lengths is wrong",
    ),
    Fault(
        "all_gather.py",
        'variants = [fingerprint_of((f"{call}, lengths", lengths, rank)) | 1 for rank in (None, group.topology.rank)]',
        "variants = [1, 1]",
        "ranks with other lengths are taken for alike",
    ),
    Fault(
        "all_gather.py",
        'if dtype.hasobject or dtype.names is not None or dtype.kind in "USM" or dtype.kind == "m":',
        "if False:",
        "Python objects are gathered as addresses",
    ),
    Fault(
        "broadcast.py",
        "    if world.rank == root and not is_in_place:",
        "    if not is_in_place:",
        "a broadcast to some ranks sends from all",
    ),
    Fault(
        "broadcast.py",
        "if root >= size:",
        "if False:",
        "a root that does not exist is accepted",
    ),
]
