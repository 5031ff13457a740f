"""The attention call, and its backward pass, that torch.compile does not trace into.

Only imported while something is being compiled: importing it loads the compiler, which takes seconds.
"""

from functools import partial

import torch

from meshattn import autograd, calls

_untraced = partial(torch.compiler.disable, reason="the ranks exchange chunks here, which cannot be traced")
attend = _untraced(calls.attend)
gradients = _untraced(autograd.gradients)
