"""The attention call, and its backward pass, that torch.compile does not trace into.

Only imported while something is being compiled: importing it loads the compiler, which takes seconds.
"""

import torch

from meshattn import autograd, calls

attend = torch.compiler.disable(  # type: ignore[no-untyped-call]
    calls.attend, reason="the ranks exchange chunks here, which cannot be traced"
)

gradients = torch.compiler.disable(  # type: ignore[no-untyped-call]
    autograd.gradients, reason="the ranks exchange chunks here, which cannot be traced"
)
