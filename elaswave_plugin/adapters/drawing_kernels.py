"""The kernels of torch that draw random numbers, which others can take the place of for a while.

They are what all else draws by: dropout, attention and ``torch.rand`` end in them. Source:
torch/library.py, ``Library.impl`` and ``get_kernel``.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

_FILL = (
    *("bernoulli_.float", "bernoulli_.Tensor", "uniform_", "normal_", "exponential_"),
    *("cauchy_", "geometric_", "log_normal_", "random_", "random_.from", "random_.to"),
)
_MAKE = (
    *("multinomial", "native_dropout"),
    *("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor"),
)
# How many numbers they take for a sample follows from others.
_TOGETHER = (
    *("randperm.generator_out", "rrelu_with_noise", "rrelu_with_noise_"),
    *("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
)
# Their backward passes draw again, so that what they are given is made larger above autograd.
_ATTENTION = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    "_scaled_dot_product_cudnn_attention",
)


class Call(NamedTuple):
    """A call of a drawing kernel.

    ``written``: places and names of the tensors that it writes; ``has_rows``: False where the
    numbers of a sample depend on others, as in a permutation.
    """

    native: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[int | str, ...]
    has_rows: bool

    def made(self) -> Any:
        """Make it as it is."""
        return self.native(*self.args, **self.kwargs)

    @property
    def values(self) -> dict[int | str, Any]:
        """Return the arguments, by place or name."""
        values: dict[int | str, Any] = dict(enumerate(self.args))
        values.update(self.kwargs)
        return values

    def made_with(self, values: dict[int | str, Any]) -> Any:
        """Make it with others, by place or name."""
        names = {key: value for key, value in values.items() if isinstance(key, str)}
        return self.native(*(values[place] for place in range(len(self.args))), **names)


class DrawingKernels:
    """Leads the drawing kernels of this process to ``draw(call)``, from `install` to `remove`."""

    def __init__(self, draw: Callable[[Call], Any]) -> None:
        self._draw = draw
        self._library: torch.library.Library | None = None
        self._is_inside = False

    def install(self) -> None:
        """Take the places of the native ones; a second call changes nothing."""
        if self._library is not None:
            return
        self._library = torch.library.Library("aten", "IMPL")
        keys = ["CPU", *(["CUDA"] if torch.cuda.is_available() else [])]
        with warnings.catch_warnings():
            # Torch warns that a kernel of its own is overridden.
            warnings.simplefilter("ignore")
            for key in keys:
                for name in (*_FILL, *_MAKE, *_TOGETHER):
                    self.replace(self._library, f"aten::{name}", key)
                for name in _ATTENTION:
                    self.replace(self._library, f"aten::{name}", f"Autograd{key}")

    def remove(self) -> None:
        """Give the native ones their places back."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def replace(self, library: "torch.library.Library", name: str, key: str) -> None:
        """Lead an operator's kernel at a dispatch key to ``draw``, as long as ``library`` is."""
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key):
            return
        native = torch.library.get_kernel(name, key)
        arguments = torch._C._get_schema(*name.partition(".")[::2]).arguments
        written = tuple(
            one.name if one.kwarg_only else place
            for place, one in enumerate(arguments)
            if one.alias_info is not None and one.alias_info.is_write
        )
        rates = [place for place, one in enumerate(arguments) if one.name == "dropout_p"]
        has_rows = name.partition("::")[2] not in _TOGETHER

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            made = partial(native.call_boxed, keys)
            drops = all((*args, 0.0)[min(place, len(args))] for place in rates)
            if self._is_inside or not drops or kwargs.get("generator") is not None:
                return made(*args, **kwargs)
            self._is_inside = True
            try:
                return self._draw(Call(made, args, kwargs, written, has_rows))
            finally:
                self._is_inside = False

        library.impl(name.partition("::")[2], kernel, key, with_keyset=True, allow_override=True)
