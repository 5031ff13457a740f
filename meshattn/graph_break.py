"""The attention call that torch.compile does not trace into.

Only imported while something is being compiled: importing it loads the compiler, which takes seconds.
"""

import torch

from meshattn import attention

attend = torch.compiler.disable(attention.attend)  # type: ignore[no-untyped-call]
