"""The programming model of tf.distribute on MPI.

One MPI rank is one replica. A strategy runs a step function on every rank and combines what the ranks computed:
within a node, across nodes, on NumPy or CuPy arrays.
"""

import os as _os
from importlib import import_module as _import_module

from mpidist.context_stack import set_default_factory as _set_default_factory
from mpidist.package_names import define_names as _define_names
from mpidist.transport.failures import job_abort as _job_abort

__version__ = "0.1.0"

# The stub names all of them. The loader reads it, also from a zip.
__all__ = sorted(_define_names(__name__, __loader__.get_data(_os.path.splitext(__file__)[0] + ".pyi").decode()))
_set_default_factory(lambda: _import_module("mpidist.strategies.default").make_default())
_job_abort.explain_failures(_os.environ)
_job_abort.show_stack(_os.environ)
_job_abort.end_job_before_start(_os.environ)
