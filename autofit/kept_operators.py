"""What selective recomputation keeps, by the names of ATen's operators: known to the step and to the code it prints."""

from __future__ import annotations

# Matrix products, convolutions and attention: nearly all of the arithmetic of a forward pass, for a part of the
# activations.
KEPT_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "_convolution",
    "cudnn_convolution",
    "miopen_convolution",
    "mkldnn_convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
