"""Which modules kernels may replace: those of this package, unchanged.

The method `fused_spec` of a feature map or of spatial weights describes what a kernel may compute
in its place, or returns None, as the base class does. If you change a module (by a subclass, a
hook, a wrapper, another module in place of a projection, or a patch of it or of a function in its
file) there is no spec, and your code runs. A parametrised weight is read through its
parametrisation, so a kernel may still compute it. Nor is there a spec of a module that would refuse
its inputs: it runs, and says why.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
CALL = ("__call__", "_wrapped_call_impl", "_call_impl", "forward")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FeatureSpec(NamedTuple):
    """φ(x) = activation(A b(x̂) + c), with b(x̂) = [sin(W₁x̂); cos(W₁x̂)], or x̂ where w1 is None."""

    activation: str  # "relu", "elu" or "softmax"
    scaling: str  # from x to x̂, as in `FeatureMap`
    num_features: int
    w1: Tensor | None = None  # (D, D)
    matrix: Tensor | None = None  # A: (M, 2D) with sines, else (N, M, D)
    bias: Tensor | None = None  # c: (M,) with sines, else (N, M)

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return self.w1, self.matrix, self.bias


class WeightSpec(NamedTuple):
    """α from logits ⟨P v + p, e_g⟩: by breaking and halting a stick, or by softmax."""

    proj_weight: Tensor  # P (D, D)
    proj_bias: Tensor  # p (D,)
    embedding: Tensor  # e (N, logits, D)
    sticks: bool
    balanced: bool
    truncated: bool
    halt_threshold: float

    @property
    def num_groups(self) -> int:
        return self.embedding.shape[1] + self.sticks


class Observer:
    """A forward hook that only looks: the layer computes the same with it and without it.

    If a kernel replaces the module, the module also runs, so that the hook sees its output.
    """

    def __init__(self, receive: Any):
        self.receive = receive

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.receive(output)


OWN_METHODS: dict[type, dict[str, Any]] = {}
OWN_FUNCTIONS: dict[type, tuple[dict[str, Any], dict[str, Any]]] = {}


def stands_for(*kinds: type) -> None:
    """Records the methods of classes and the functions of their file, so that patches are noticed.

    Called at the end of the file.
    """
    for kind in kinds:
        methods = {name for name in dir(kind) if callable(getattr(kind, name))}
        names = {*methods.difference(dir(nn.Module)), *CALL}
        OWN_METHODS[kind] = {name: getattr(kind, name) for name in names}
        around = vars(sys.modules[kind.__module__])
        functions = {
            name: x
            for name, x in around.items()
            if isinstance(x, FunctionType) and x.__module__ == kind.__module__
        }
        OWN_FUNCTIONS[kind] = around, functions


stands_for(nn.Linear)


def runs_own_code(module: Any, kind: type) -> bool:
    """Whether calling the module runs the code of `kind`, unchanged, and nothing else."""
    own, state = type(module), module.__dict__
    if own is not kind and not (parametrize.is_parametrized(module) and own.__bases__ == (kind,)):
        return False
    for name in GLOBAL_HOOKS:  # plain loops: every call of a layer runs them
        if getattr(torch_module, name):
            return False
    for name in HOOKS:
        hooks = state[name]
        if hooks and not all(isinstance(hook, Observer) for hook in hooks.values()):
            return False
    around, functions = OWN_FUNCTIONS[kind]
    for name, function in functions.items():
        if around.get(name) is not function:
            return False
    for name, method in OWN_METHODS[kind].items():
        if getattr(own, name) is not method or name in state:
            return False
    return True


def spec_of(module: Any) -> Any:
    """What a kernel may compute in place of a module, or None.

    Asked of its class: wrappers such as `torch.compile` makes pass on what they do not have, and
    run code of their own around it.
    """
    fused_spec = getattr(type(module), "fused_spec", None)
    return None if fused_spec is None else fused_spec(module)


def replaces(*methods: Callable[..., Any]) -> Callable[..., Any]:
    """Says of a method which others of its class it computes by kernels, see `replaces_own`."""

    def mark(fused: Any) -> Any:
        fused.replaced = {method.__name__: method for method in methods}
        return fused

    return mark


def replaces_own(module: nn.Module, fused: Any) -> bool:
    """Whether a module has the methods that `fused` computes, neither overridden nor patched."""
    own, state = type(module), vars(module)
    for name, method in fused.replaced.items():
        if getattr(own, name) is not method or name in state:
            return False
    return True


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether tensors are PyTorch's own, not quantised, sharded or otherwise wrapped."""
    for x in tensors:
        if x is not None and type(x) is not Tensor and type(x) is not nn.Parameter:
            return False
    return True


def observe(module: nn.Module, *inputs: Tensor) -> None:
    """Runs a module that a kernel replaced, if it has hooks."""
    if module._forward_hooks:
        module(*(x.detach() for x in inputs))
