"""For the tests of one's own operators: the checks that ktinject's operators pass, in one call.

Nothing here needs a test framework.
"""

from ktinject.testing.case import Case
from ktinject.testing.conformance import CHECKS, COMPUTING, check_operator

__all__ = ["CHECKS", "COMPUTING", "Case", "check_operator"]
