"""Searches for the cheapest assignment of a cost network, behind one registry.

Every search has its file and registers itself under a name; `solve` calls it by that name.
"""

from pase_mtf.search import brute_force, exact, k_best, mcmc, pase  # noqa: F401  (they register themselves)
from pase_mtf.search.certificate import Certificate, CertificateError, check_certificate
from pase_mtf.search.registry import Progress, Solution, methods, register, solve

__all__ = ["Certificate", "CertificateError", "Progress", "Solution", "check_certificate", "methods", "register",
           "solve"]
