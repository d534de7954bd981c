"""The tasks of a job, and which of them this process is.

The facts
    `ClusterSpec`               jobs, and the addresses of their tasks
    `ClusterResolver`           the interface: a spec, this process's task, a check against MPI

Where they come from
    `MPIClusterResolver`        the ranks of a communicator; what strategies use by default
    `SlurmClusterResolver`      the variables that `srun` sets
    `FluxClusterResolver`       the job of Flux
    `TFConfigClusterResolver`   the variable TF_CONFIG
    `SimpleClusterResolver`     the program itself
    `UnionResolver`             several of them

A new resolver is one file beside these and one line below.
"""

from mpidist.cluster_resolver.cluster_spec import ClusterSpec
from mpidist.cluster_resolver.flux import FluxClusterResolver
from mpidist.cluster_resolver.mpi import MPIClusterResolver
from mpidist.cluster_resolver.resolver import ClusterResolver
from mpidist.cluster_resolver.simple import SimpleClusterResolver
from mpidist.cluster_resolver.slurm import SlurmClusterResolver
from mpidist.cluster_resolver.tf_config import TFConfigClusterResolver
from mpidist.cluster_resolver.union import UnionResolver
from mpidist.package_names import define_names as _define_names

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "FluxClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]

_define_names(__name__)
