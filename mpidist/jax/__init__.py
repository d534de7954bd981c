"""Reductions over ranks inside functions that JAX transforms. Import it before JAX computes anything."""

from mpidist.jax.calls import across_ranks, pmax, pmean, pmin, psum

__all__ = ["across_ranks", "pmax", "pmean", "pmin", "psum"]
